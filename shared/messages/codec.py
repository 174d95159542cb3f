"""Wire messages <-> our own records, validated strictly in the direction of reading.

What was parsed has the right types (``wire_format.py``), and nothing else is believed of it before
it has passed here: a violation by a peer raises RemoteProtocolError with the field's name. Hides
the message library from the cores. Client messages are checked by the gateway's own limits, not
here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypeVar

from shared import wire
from shared.errors import ERROR_TYPES, IncompatiblePeer, MeshError, RemoteProtocolError, WorkerLost
from shared.grammar import MAX_GRAMMAR_BYTES
from shared.home import Role
from shared.ids import ID_BYTES, Incarnation, LeaseToken, RequestId, StreamId
from shared.kv.layout import DTYPE_BYTES, KvLayout
from shared.messages.columns import pack_f32, pack_u8, pack_u32, unpack_f32, unpack_u8, unpack_u32
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.model_spec import ModelSpec
from shared.request import (
    MAX_SALT_BYTES,
    AnswerToken,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    WorkItem,
)
from shared.schedule.plan import NewToken, PromptTimes
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order, PrefixAt
from shared.version import VERSION

Number = TypeVar("Number", int, float)

PROTOCOL_VERSION = 10
"""Grows when a message changes its meaning; peers of different versions do not work together."""

ROLES = {wire.Role.PREFILL: Role.PREFILL, wire.Role.DECODE: Role.DECODE}
"""Those of workers."""

FINGERPRINT_BYTES = 32
MAX_TOKENS = (MAX_MESSAGE_BYTES - MAX_GRAMMAR_BYTES - (64 << 10)) // 4
"""Longest token list in a message, which has room for all else that an order says."""
_MAX_U32 = (1 << 32) - 1
_LAST_REASON = int(max(FinishReason))  # they are numbered without gaps
_NAN = math.nan
_TRACE_CONTEXT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class StepColumns(NamedTuple):
    """A checked ``StepTokens``, not yet cut into rows: row i is value i of each column.

    indices: of the tokens in their answers. finish_reasons: values of ``FinishReason``. logprobs:
    None = nobody asked for any.
    """

    stream_ids: Sequence[int]
    indices: Sequence[int]
    token_ids: Sequence[int]
    finish_reasons: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None


# --- checks ---------------------------------------------------------------------------------------


def _require(condition: bool, message: str, param: str) -> None:
    if not condition:
        raise RemoteProtocolError(f"{param} {message}", param=param)


def checked_id(value: bytes, param: str) -> bytes:
    """Return it. Raises RemoteProtocolError: it has another length than ids have."""
    if len(value) != ID_BYTES:
        raise RemoteProtocolError(f"{param} must be {ID_BYTES} bytes", param=param)
    return value


def _within(value: Number, low: Number, high: Number, param: str) -> Number:
    if not low <= value <= high:  # NaN fails any comparison
        raise RemoteProtocolError(f"{param} must be in {low}..{high}", param=param)
    return value


def is_duration(seconds: float) -> bool:
    """Whether anything can take so long: what adds up such times never overflows."""
    return 0 <= seconds < 1e9  # NaN fails any comparison


def _seconds(value: float, param: str) -> float:
    if not is_duration(value):
        raise RemoteProtocolError(f"{param} must be a finite number of seconds >= 0", param=param)
    return value


def require_hello(hello: wire.Hello | None) -> wire.Hello:
    """Return a peer's hello. Raises RemoteProtocolError: none or incomplete. IncompatiblePeer:
    version."""
    if hello is None or hello.incarnation == 0:
        raise RemoteProtocolError("a stream begins with a complete hello", param="hello")
    if hello.protocol_version != PROTOCOL_VERSION:
        raise IncompatiblePeer(
            f"the peer ({hello.version or 'unknown version'}) speaks protocol "
            f"{hello.protocol_version}, this process {PROTOCOL_VERSION}: run one release",
            code="protocol_version",
        )
    return hello


def gateway_of(hello: wire.Hello | None) -> Incarnation:
    """Return the incarnation of a gateway that says hello.

    Raises RemoteProtocolError, IncompatiblePeer: see ``require_hello``, or another role."""
    greeting = require_hello(hello)
    if greeting.role != wire.Role.GATEWAY:
        raise RemoteProtocolError(f"expected a GATEWAY, not a {greeting.role!r}", param="role")
    return Incarnation(greeting.incarnation)


def own_hello(role: wire.Role, incarnation: Incarnation) -> wire.Hello:
    """Return how this process begins a stream."""
    return wire.Hello(
        protocol_version=PROTOCOL_VERSION, role=role, incarnation=incarnation, version=VERSION
    )


def role_to_wire(role: Role) -> wire.Role:
    return wire.Role[role.name]


def fields_of(record: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


# --- small records --------------------------------------------------------------------------------


def error_to_wire(error: MeshError) -> wire.Error:
    """Return the wire form of an error; its class travels as ``type``."""
    return wire.Error(**fields_of(error, ("type", "message", "param", "code", "retry_after_s")))


def error_from_wire(error: wire.Error | None) -> MeshError:
    """Return the exception that a peer reported; an unknown type becomes WorkerLost."""
    if error is None:
        return WorkerLost("the worker failed without saying why")
    cls = ERROR_TYPES.get(error.type, WorkerLost)
    retry_after_s = error.retry_after_s
    # Of a peer that is wrong, NaN too: a hint must not keep clients away for ever.
    if not 0 <= retry_after_s < 1e6:
        retry_after_s = 0.0
    return cls(error.message, param=error.param, code=error.code, retry_after_s=retry_after_s)


def layout_to_wire(layout: KvLayout) -> wire.KvLayout:
    return wire.KvLayout(**asdict(layout))


def layout_from_wire(layout: wire.KvLayout | None) -> KvLayout:
    if layout is None:
        raise RemoteProtocolError("layout must be given", param="layout")
    _require(layout.dtype in DTYPE_BYTES, f"must be one of {', '.join(DTYPE_BYTES)}", "dtype")
    return KvLayout(
        dtype=layout.dtype,
        num_layers=_within(layout.num_layers, 1, 4096, "num_layers"),
        num_kv_heads=_within(layout.num_kv_heads, 1, 4096, "num_kv_heads"),
        head_dim=_within(layout.head_dim, 1, 65536, "head_dim"),
        parts=_within(layout.parts, 1, 2, "parts"),
    )


_SAME_MODEL = ("name", "fingerprint", "vocab_size", "max_model_len", "dtype", "engine")


def model_to_wire(spec: ModelSpec) -> wire.ModelInfo:
    """Return what peers and clients may know of a model."""
    return wire.ModelInfo(**fields_of(spec, _SAME_MODEL))


def model_from_wire(model: wire.ModelInfo | None) -> ModelSpec:
    """Check and return a model; it carries no end-of-sequence ids, for only workers need them."""
    if model is None:
        raise RemoteProtocolError("model must be given", param="model")
    is_complete = len(model.fingerprint) == FINGERPRINT_BYTES
    _require(is_complete, f"must be {FINGERPRINT_BYTES} bytes", "fingerprint")
    for field in ("name", "engine"):
        name = getattr(model, field)
        _require(len(name) <= 256, "must be a short name", field)
    _within(model.vocab_size, 1, 1 << 24, "vocab_size")
    _within(model.max_model_len, 1, 1 << 28, "max_model_len")
    return ModelSpec(**fields_of(model, _SAME_MODEL))


# --- sampling and work ----------------------------------------------------------------------------


_SAME_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs"),
    *("allowed_token_ids", "grammar"),
)
"""What a record and its wire form call and hold alike."""

_SAMPLING_RANGES = {
    "max_tokens": (1, _MAX_U32),
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "logprobs": (0, 1024),
    "prompt_logprobs": (0, 1024),
}


def sampling_to_wire(params: SamplingParams) -> wire.SamplingParams:
    message = wire.SamplingParams(**fields_of(params, _SAME_SAMPLING))
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        message.logit_bias_ids, message.logit_bias_values = pack_u32(ids), pack_f32(values)
    if params.stop_token_ids:
        message.stop_token_ids = pack_u32(params.stop_token_ids)
    if params.bad_words:
        message.bad_word_lengths = pack_u32(map(len, params.bad_words))
        message.bad_word_ids = pack_u32(itertools.chain(*params.bad_words))
    return message


def sampling_from_wire(params: wire.SamplingParams | None) -> SamplingParams:
    if params is None:
        raise RemoteProtocolError("a request lacks its sampling", param="sampling")
    same = fields_of(params, _SAME_SAMPLING)
    for name, (low, high) in _SAMPLING_RANGES.items():
        if same[name] is not None:
            _within(same[name], low, high, name)
    is_short = len(params.grammar.encode()) <= MAX_GRAMMAR_BYTES
    _require(is_short, f"must be at most {MAX_GRAMMAR_BYTES} bytes", "grammar")
    unpack_u32(params.allowed_token_ids, name="allowed_token_ids")  # it stays a column
    bias_ids = unpack_u32(params.logit_bias_ids, name="logit_bias_ids")
    bias = unpack_f32(params.logit_bias_values, count=len(bias_ids), name="logit_bias_values")
    _require(all(map(math.isfinite, bias)), "must be finite", "logit_bias_values")
    return SamplingParams(
        **same,
        logit_bias=tuple(zip(bias_ids, bias, strict=True)),
        stop_token_ids=tuple(unpack_u32(params.stop_token_ids, name="stop_token_ids")),
        bad_words=_bad_words(params),
    )


def _bad_words(params: wire.SamplingParams) -> tuple[tuple[int, ...], ...]:
    lengths = unpack_u32(params.bad_word_lengths, name="bad_word_lengths")
    _require(0 not in lengths, "must be at least 1", "bad_word_lengths")
    ids = iter(unpack_u32(params.bad_word_ids, count=sum(lengths), name="bad_word_ids"))
    return tuple(tuple(itertools.islice(ids, length)) for length in lengths)


def salted_tokens(message: wire.WorkOrder | wire.PullPrefix) -> tuple[Sequence[int], bytes]:
    """Check and return a prompt's tokens, and its tenant's salt."""
    token_ids = unpack_u32(message.token_ids, name="token_ids")
    _require(0 < len(token_ids) <= MAX_TOKENS, f"must be 1..{MAX_TOKENS} tokens", "token_ids")
    is_short = len(message.cache_salt) <= MAX_SALT_BYTES
    _require(is_short, f"must be at most {MAX_SALT_BYTES} bytes", "cache_salt")
    return token_ids, message.cache_salt


def _work_item(message: wire.WorkOrder) -> WorkItem:
    token_ids, cache_salt = salted_tokens(message)
    return WorkItem(
        token_ids=tuple(token_ids),
        num_prompt_tokens=_within(
            message.num_prompt_tokens, 1, len(token_ids), "num_prompt_tokens"
        ),
        sampling=sampling_from_wire(message.sampling),
        cache_salt=cache_salt,
    )


def _trace_context(value: str) -> str:
    is_one = not value or _TRACE_CONTEXT.fullmatch(value) is not None
    _require(is_one, "must be a traceparent or empty", "trace_context")
    return value


class _NamesTransfer(Protocol):
    request_id: bytes
    attempt: int
    lease_token: bytes


def key_of(message: _NamesTransfer) -> TransferKey:
    """Check and return which transfer a message is about."""
    return TransferKey(
        RequestId(checked_id(message.request_id, "request_id")),
        message.attempt,
        LeaseToken(checked_id(message.lease_token, "lease_token")),
    )


def order_from_wire(command: wire.WorkOrder) -> Order:
    _within(command.attempt, 0, 1000, "attempt")
    return Order(
        stream_id=StreamId(command.stream_id),
        key=key_of(command),
        item=_work_item(command),
        peer=Incarnation(command.peer_incarnation) or None,
        wait_s=_seconds(command.wait_s, "wait_s"),
        deadline_s=_seconds(command.deadline_s, "deadline_s") or None,
        trace_context=_trace_context(command.trace_context),
        prefix=_prefix(command.prefix, len(command.token_ids) // 4),
    )


def _prefix(prefix: wire.PrefixSource | None, num_tokens: int) -> PrefixAt | None:
    if prefix is None:
        return None
    return PrefixAt(
        Incarnation(prefix.incarnation),
        _within(prefix.num_tokens, 1, num_tokens, "num_tokens"),
        _seconds(prefix.wait_s, "wait_s"),
    )


# --- tokens ---------------------------------------------------------------------------------------


def logprobs_bytes(num_rows: int, num_top: int) -> int:
    """Return how much ``num_rows`` rows of logprobs take on the wire, ``num_top`` alternatives
    each."""
    return num_rows * (8 + 8 * num_top)


def _flatten(rows: Iterable[TokenLogprobs | None]) -> tuple[bytes, bytes, bytes, bytes]:
    """Pack rows as the columns (logprobs, top_counts, top_ids, top_logprobs)."""
    logprobs: list[float] = []
    counts: list[int] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for row in rows:
        # 0.0 is a logprob, that of a sure token: none travels as NaN.
        logprobs.append(_NAN if row is None else row.logprob)
        top = () if row is None else row.top
        counts.append(len(top))
        for token_id, logprob in top:
            top_ids.append(token_id)
            top_logprobs.append(logprob)
    return pack_f32(logprobs), pack_u32(counts), pack_u32(top_ids), pack_f32(top_logprobs)


def _unflatten(
    num_rows: int, logprobs: bytes, counts: bytes, top_ids: bytes, top_logprobs: bytes
) -> list[TokenLogprobs]:
    values = unpack_f32(logprobs, count=num_rows, name="logprobs")
    sizes = unpack_u32(counts, count=num_rows, name="top_counts")
    total = sum(sizes)
    ids = unpack_u32(top_ids, count=total, name="top_ids")
    tops = unpack_f32(top_logprobs, count=total, name="top_logprobs")
    rows: list[TokenLogprobs] = []
    start = 0
    for value, size in zip(values, sizes, strict=True):
        stop = start + size
        rows.append(
            TokenLogprobs(value, tuple(zip(ids[start:stop], tops[start:stop], strict=True)))
        )
        start = stop
    return rows


def step_tokens_to_wire(rows: Sequence[tuple[StreamId, NewToken]]) -> wire.StepTokens:
    """Pack one step's tokens; the logprob columns stay empty if no row has any."""
    message = wire.StepTokens(
        stream_ids=pack_u32([stream_id for stream_id, _ in rows]),
        indices=pack_u32([token.index for _, token in rows]),
        token_ids=pack_u32([token.token_id for _, token in rows]),
        finish_reasons=pack_u8([token.finish_reason for _, token in rows]),
    )
    if any(token.logprobs is not None for _, token in rows):
        columns = _flatten(token.logprobs for _, token in rows)
        message.logprobs, message.top_counts, message.top_ids, message.top_logprobs = columns
    return message


def step_columns_from_wire(step: wire.StepTokens) -> StepColumns:
    """Unpack and check one step's tokens; a row without logprobs has None."""
    stream_ids = unpack_u32(step.stream_ids, name="stream_ids")
    count = len(stream_ids)
    indices = unpack_u32(step.indices, count=count, name="indices")
    token_ids = unpack_u32(step.token_ids, count=count, name="token_ids")
    reasons = unpack_u8(step.finish_reasons, count=count, name="finish_reasons")
    if max(reasons, default=0) > _LAST_REASON:
        raise RemoteProtocolError("finish_reasons has an unknown one", param="finish_reasons")
    logprobs: list[TokenLogprobs | None] | None = None
    if step.logprobs:
        rows = _unflatten(count, step.logprobs, step.top_counts, step.top_ids, step.top_logprobs)
        logprobs = [None if math.isnan(row.logprob) else row for row in rows]
    return StepColumns(stream_ids, indices, token_ids, reasons, logprobs)


def prefill_token_to_wire(
    stream_id: StreamId, token: NewToken, times: PromptTimes
) -> wire.PrefillToken:
    """Pack the first token of an attempt, and how its prompt was computed."""
    message = wire.PrefillToken(
        stream_id=stream_id,
        index=token.index,
        token_id=token.token_id,
        finish_reason=wire.FinishReason(int(token.finish_reason)),
        logprob=_NAN,
        **times._asdict(),
    )
    if (logprobs := token.logprobs) is not None:
        message.logprob = logprobs.logprob
        message.top_ids = pack_u32(token_id for token_id, _ in logprobs.top)
        message.top_logprobs = pack_f32(value for _, value in logprobs.top)
    if token.prompt_logprobs:
        values, counts, top_ids, top_logprobs = _flatten(token.prompt_logprobs)
        message.prompt_logprobs = wire.PromptLogprobs(
            logprobs=values, top_counts=counts, top_ids=top_ids, top_logprobs=top_logprobs
        )
    return message


def told_s(seconds: float) -> float:
    """Return a duration that a worker tells for receipts and predictions; one that cannot be
    (negative, not finite) is as if it was not told: a clock that jumped must not cost an answer."""
    return seconds if is_duration(seconds) else 0.0


def prefill_token_from_wire(event: wire.PrefillToken) -> tuple[AnswerToken, PromptTimes]:
    """Unpack and check the first token of an attempt, and how its prompt was computed."""
    top_ids = unpack_u32(event.top_ids, name="top_ids")
    tops = unpack_f32(event.top_logprobs, count=len(top_ids), name="top_logprobs")
    logprobs = None
    if not math.isnan(event.logprob):
        logprobs = TokenLogprobs(event.logprob, tuple(zip(top_ids, tops, strict=True)))
    prompt_logprobs = None
    if (rows := event.prompt_logprobs) is not None:
        num_rows = len(rows.top_counts) // 4
        prompt_logprobs = tuple(
            _unflatten(num_rows, rows.logprobs, rows.top_counts, rows.top_ids, rows.top_logprobs)
        )
    token = AnswerToken(
        event.index,
        event.token_id,
        FinishReason(_within(event.finish_reason, 0, _LAST_REASON, "finish_reason")),
        logprobs,
        prompt_logprobs,
    )
    times = PromptTimes(
        told_s(event.queue_s),
        told_s(event.compute_s),
        event.cached_tokens,
        event.fetched_tokens,
        told_s(event.fetch_s),
        event.fetched_bytes,
        event.dram_tokens,
        event.ssd_tokens,
        told_s(event.load_s),
    )
    return token, times
