"""What travels comes back the same, and nothing that a peer can send breaks more than a rule."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared import wire
from shared.errors import (
    ERROR_TYPES,
    IncompatiblePeer,
    InvalidRequest,
    LocalProtocolError,
    RemoteProtocolError,
    TooLarge,
    WorkerLost,
)
from shared.ids import StreamId
from shared.kv.layout import DTYPE_BYTES, KvLayout
from shared.messages import codec, columns, transfer_codec
from shared.messages.message_codec import MessageCodec
from shared.model_spec import ModelSpec
from shared.request import AnswerToken, FinishReason, SamplingParams, TokenLogprobs, WorkItem
from shared.schedule.plan import NewToken
from shared.schedule.sequence import Sequence as TokenSequence
from tests.support.calls import ALL_METHODS
from tests.support.step_rows import step_tokens_from_wire

U32 = st.integers(0, 2**32 - 1)
F32 = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
UNIT = st.floats(0, 1, width=32)
MESSAGES = sorted({t.__name__ for m in ALL_METHODS for t in (m.request_type, m.reply_type)})
CODEC = MessageCodec()

READERS: dict[str, Callable[[Any], object]] = {
    "WorkOrder": codec.order_from_wire,
    "SamplingParams": codec.sampling_from_wire,
    "KvLayout": codec.layout_from_wire,
    "ModelInfo": codec.model_from_wire,
    "Hello": codec.require_hello,
    "StepTokens": step_tokens_from_wire,
    "PrefillToken": codec.prefill_token_from_wire,
    "Error": codec.error_from_wire,
    "PairMessage": transfer_codec.message_from_wire,
}

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**32 - 1),
    min_tokens=U32,
    temperature=st.floats(0, 100, width=32),
    top_k=U32,
    top_p=UNIT,
    min_p=UNIT,
    repetition_penalty=st.floats(0.125, 8, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.lists(st.tuples(U32, FINITE), max_size=5).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(U32, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    allowed_token_ids=st.lists(U32, max_size=5).map(columns.pack_u32),
    bad_words=st.lists(st.lists(U32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)

LOGPROBS = st.builds(TokenLogprobs, FINITE, st.lists(st.tuples(U32, FINITE), max_size=4).map(tuple))


TOKENS = st.builds(
    AnswerToken, U32, U32, st.sampled_from(FinishReason), st.none() | LOGPROBS, st.none()
)


def over_the_wire(message: Any) -> Any:
    """Encode and decode, as a call does."""
    return CODEC.decode(CODEC.encode(message, type(message)), type(message))


@given(SAMPLING)
def test_sampling_survives_the_wire(params: SamplingParams) -> None:
    """Sampling parameters come back equal."""
    assert codec.sampling_from_wire(over_the_wire(codec.sampling_to_wire(params))) == params


@given(st.sampled_from(sorted(DTYPE_BYTES)), *[st.integers(1, 4096)] * 3)
def test_layout_survives_the_wire(dtype: str, layers: int, heads: int, dim: int) -> None:
    """A KV layout comes back equal."""
    layout = KvLayout(dtype=dtype, num_layers=layers, num_kv_heads=heads, head_dim=dim)
    assert codec.layout_from_wire(over_the_wire(codec.layout_to_wire(layout))) == layout


def test_model_survives_the_wire() -> None:
    """A model comes back equal, but for what only workers know."""
    spec = ModelSpec(
        name="m",
        fingerprint=bytes(range(32)),
        vocab_size=100,
        max_model_len=64,
        eos_token_ids=frozenset(),
        dtype="float32",
    )
    assert codec.model_from_wire(over_the_wire(codec.model_to_wire(spec))) == spec


@given(
    st.lists(
        st.tuples(
            U32.map(StreamId),
            TOKENS,
        ),
        max_size=6,
    )
)
def test_step_tokens_survive_the_wire(rows: list[tuple[StreamId, AnswerToken]]) -> None:
    """One step's tokens come back equal and in order."""
    sent = codec.step_tokens_to_wire([(stream_id, _sampled(token)) for stream_id, token in rows])
    assert step_tokens_from_wire(over_the_wire(sent)) == rows


def _sampled(token: AnswerToken) -> NewToken:
    """The token as the worker that sampled it has it."""
    item = WorkItem(token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams())
    facts = token.token_id, token.index, token.finish_reason, token.logprobs
    return NewToken(TokenSequence(item), *facts, ())


@given(st.sampled_from(sorted(ERROR_TYPES)), st.text(), st.text(), st.floats(0, 1e5))
def test_errors_survive_the_wire(kind: str, message: str, param: str, retry_after_s: float) -> None:
    """Every kind of error comes back as its class with all fields."""
    sent = ERROR_TYPES[kind](message, param=param, code="c", retry_after_s=retry_after_s)
    got = codec.error_from_wire(over_the_wire(codec.error_to_wire(sent)))
    assert type(got) is type(sent)
    assert (got.message, got.param, got.code, got.retry_after_s) == (
        message,
        param,
        "c",
        retry_after_s,
    )


def test_unknown_error_is_a_lost_worker() -> None:
    """An error type of a later release still is an error that may be retried elsewhere."""
    assert isinstance(codec.error_from_wire(wire.Error(type="of_tomorrow")), WorkerLost)
    assert isinstance(codec.error_from_wire(None), WorkerLost)


@given(st.sampled_from([*MESSAGES, *READERS]), st.binary(max_size=200))
@example("SamplingParams", b"\x0b" * 200)
@example("GenerateRequest", b"\x45\x00\x00\x00\x00")
def test_random_bytes_break_a_rule_or_nothing(name: str, data: bytes) -> None:
    """Any bytes are a message or a typed error; a message passes its reader or breaks a rule."""
    try:
        message = CODEC.decode(data, getattr(wire, name))
        READERS.get(name, lambda _: None)(message)
    except (RemoteProtocolError, TooLarge, IncompatiblePeer, InvalidRequest):
        return


@given(st.sampled_from(sorted(READERS)), st.data())
def test_damaged_messages_break_a_rule_or_nothing(name: str, data: st.DataObject) -> None:
    """Well-formed messages with a few bytes changed never surprise a reader."""
    good: dict[str, Any] = {
        "WorkOrder": wire.WorkOrder(
            stream_id=1,
            request_id=bytes(16),
            token_ids=columns.pack_u32([1, 2, 3]),
            num_prompt_tokens=3,
            sampling=codec.sampling_to_wire(SamplingParams(logit_bias=((1, 0.5),))),
            deadline_s=1.5,
            lease_token=bytes(16),
        ),
        "StepTokens": codec.step_tokens_to_wire(
            [
                (
                    StreamId(1),
                    _sampled(AnswerToken(2, 3, FinishReason.STOP, TokenLogprobs(-0.5, ((1, -1),)))),
                )
            ]
        ),
        "PairMessage": wire.PairMessage(
            grant=wire.TransferGrant(
                request_id=bytes(16), transfer_id=bytes(16), epoch=1, lease_token=bytes(16)
            )
        ),
        "Hello": wire.Hello(protocol_version=1, incarnation=7, version="1"),
    }
    raw = bytearray(bytes(good.get(name) or getattr(wire, name)()))
    for _ in range(data.draw(st.integers(1, 5))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        READERS[name](CODEC.decode(bytes(raw), getattr(wire, name)))
    except (RemoteProtocolError, TooLarge, IncompatiblePeer):
        return


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", b"short"),
        ("lease_token", b""),
        ("lease_token", bytes(17)),
        ("token_ids", b""),
        ("token_ids", b"abc"),
        ("num_prompt_tokens", 0),
        ("num_prompt_tokens", 4),
        ("deadline_s", math.nan),
        ("deadline_s", -1.0),
        ("deadline_s", math.inf),
        ("cache_salt", bytes(1000)),
        ("sampling", None),
        ("trace_context", "nonsense"),
        ("trace_context", f"00-{'A' * 32}-{'b' * 16}-01"),
        ("trace_context", f"00-{'a' * 32}-{'b' * 16}-01-"),
    ],
)
def test_order_that_breaks_a_rule_names_the_field(field: str, value: Any) -> None:
    """An order with one wrong field is refused, and the error names the field."""
    fields: dict[str, Any] = {
        "stream_id": 1,
        "request_id": bytes(16),
        "token_ids": columns.pack_u32([1, 2, 3]),
        "num_prompt_tokens": 3,
        "sampling": codec.sampling_to_wire(SamplingParams()),
        "lease_token": bytes(16),
    }
    assert codec.order_from_wire(wire.WorkOrder(**fields)).item.token_ids == (1, 2, 3)
    with pytest.raises(RemoteProtocolError) as caught:
        codec.order_from_wire(wire.WorkOrder(**{**fields, field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", math.nan),
        ("temperature", -0.5),
        ("top_p", 1.5),
        ("min_p", math.inf),
        ("repetition_penalty", 0.0),
        ("logprobs", 100_000),
        ("logit_bias_values", b"\0\0\0\0"),
        ("stop_token_ids", b"\0"),
    ],
)
def test_sampling_that_breaks_a_rule_names_the_field(field: str, value: Any) -> None:
    """Sampling out of range is refused, and the error names the field."""
    message = codec.sampling_to_wire(SamplingParams())
    setattr(message, field, value)
    with pytest.raises(RemoteProtocolError) as caught:
        codec.sampling_from_wire(message)
    assert caught.value.param == field


@given(st.lists(U32), st.lists(st.integers(0, 2**64 - 1)), st.lists(st.integers(0, 255)))
def test_integer_columns_survive(u32: list[int], u64: list[int], u8: list[int]) -> None:
    """Columns of integers come back equal; u32 is what protobuf's packed fixed32 is."""
    assert list(columns.unpack_u32(columns.pack_u32(u32), count=len(u32))) == u32
    assert list(columns.unpack_u64(columns.pack_u64(u64), count=len(u64))) == u64
    assert list(columns.unpack_u8(columns.pack_u8(u8), count=len(u8))) == u8
    assert columns.pack_u32(u32) == b"".join(value.to_bytes(4, "little") for value in u32)


@given(st.lists(F32))
def test_float_columns_survive_to_the_bit(values: list[float]) -> None:
    """Columns of floats come back equal, NaN and infinities included."""
    packed = columns.pack_f32(values)
    assert columns.pack_f32(columns.unpack_f32(packed)) == packed
    assert packed == array("f", values).tobytes()


@given(st.binary(max_size=40), st.integers(0, 10))
def test_columns_of_the_wrong_length_are_refused(data: bytes, count: int) -> None:
    """A column that is not exactly as long as it must be breaks the protocol."""
    for unpack, size in (
        (columns.unpack_u32, 4),
        (columns.unpack_f32, 4),
        (columns.unpack_u64, 8),
        (columns.unpack_u8, 1),
    ):
        if len(data) == count * size:
            assert len(unpack(data, count=count)) == count
        else:
            with pytest.raises(RemoteProtocolError, match="column"):
                unpack(data, count=count)


def test_values_that_do_not_fit_are_our_own_fault() -> None:
    """Packing what does not fit is a bug of ours, and a NaN where numbers must be finite is
    theirs."""
    for pack, value in (
        (columns.pack_u32, 2**32),
        (columns.pack_u32, -1),
        (columns.pack_u64, 2**64),
        (columns.pack_u8, 256),
    ):
        with pytest.raises(LocalProtocolError):
            pack([value])


UNKNOWN = b"\xf8\x7f\x01"
"""Field 2047, which no message has."""


def test_unknown_fields_are_dropped_before_parsing() -> None:
    """A field of a later release does not reach the message library."""
    message = CODEC.decode(UNKNOWN + bytes(wire.Granted(stream_id=3)) + UNKNOWN, wire.Granted)
    assert bytes(message) == bytes(wire.Granted(stream_id=3))


@pytest.mark.parametrize(
    "message",
    [
        wire.GenerateRequest.parse(UNKNOWN),
        wire.GenerateRequest(params=wire.GenerateParams.parse(UNKNOWN)),
        wire.GenerateRequest(messages=[wire.ChatMessage(), wire.ChatMessage.parse(UNKNOWN)]),
        wire.TokenizeRequest(rendering=wire.Rendering.parse(UNKNOWN)),
    ],
)
def test_what_a_client_asks_for_in_an_unknown_field_is_refused(message: Any) -> None:
    """At every depth and by its number: a later release may read a wish there."""
    with pytest.raises(InvalidRequest, match="has no field 2047 of wire type") as refusal:
        CODEC.decode(bytes(message), type(message))
    assert (refusal.value.param, refusal.value.code) == ("2047", "unsupported")


def test_entries_are_counted_at_every_depth() -> None:
    """Repeated entries count together, wherever in the message they are."""
    peers = [wire.Peer()] * 70_000
    directive = wire.GatewayDirective(peers=wire.PeerList(peers=peers))
    with pytest.raises(TooLarge):
        over_the_wire(directive)
    assert len(over_the_wire(wire.PeerList(peers=peers[:100])).peers) == 100
