"""Messages of a pair stream: what is packed comes out, and nothing malformed gets in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.errors import IncompatiblePeer, NoBlocks, RemoteProtocolError
from shared.ids import Incarnation, LeaseToken, RequestId, TransferId
from shared.kv.layout import KvLayout
from shared.lanes import Certainty, LaneFinding
from shared.messages.transfer_codec import (
    PairIdentity,
    agree,
    command_from_wire,
    command_to_wire,
    finding_of,
    hello_to_wire,
    lane_of,
    reply_from_wire,
    reply_to_wire,
    windows_from_wire,
    windows_to_wire,
)
from shared.model_spec import ModelSpec
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    Open,
    Refused,
    Span,
    TransferKey,
    WindowOffer,
)

u32 = st.integers(0, 2**32 - 1)
ids = st.binary(min_size=16, max_size=16).map(TransferId)
keys = st.builds(TransferKey, ids.map(RequestId), u32, ids.map(LeaseToken))
commands = st.one_of(
    st.builds(Open, keys),
    st.builds(Span, ids, u32, u32),
    st.builds(Commit, ids, u32, u32),
    st.builds(Abort, ids, st.none(), u32),
)
replies = st.one_of(
    st.builds(Grant, keys, ids, st.integers(0, 2**64 - 1), st.integers(0, 2**63), u32),
    st.builds(Credit, ids, u32, st.lists(u32, max_size=5).map(tuple)),
    st.builds(Ack, ids, u32, st.booleans()),
    st.builds(Abort, ids, st.none(), u32),
)


@given(commands)
def test_commands_cross_unchanged(command: Any):
    """Through real bytes."""
    raw = bytes(command_to_wire(command))
    assert command_from_wire(wire.PushCommand.parse(raw)) == command


@given(replies)
def test_replies_cross_unchanged(reply: Any):
    """Through real bytes."""
    raw = bytes(reply_to_wire(reply))
    assert reply_from_wire(wire.PushEvent.parse(raw)) == reply


def test_errors_cross_as_what_they_are():
    """Type, message and code survive; an abort without an error stays without."""
    error = NoBlocks("full", code="x")
    key = TransferKey(RequestId(b"r" * 16), 1, LeaseToken(b"k" * 16))
    refused = reply_from_wire(wire.PushEvent.parse(bytes(reply_to_wire(Refused(key, error)))))
    assert isinstance(refused, Refused)
    assert (type(refused.error), refused.error.message, refused.error.code) == (
        NoBlocks,
        "full",
        "x",
    )
    abort = Abort(TransferId(b"t" * 16), error, 3)
    crossed = command_from_wire(wire.PushCommand.parse(bytes(command_to_wire(abort))))
    assert isinstance(crossed, Abort)
    assert isinstance(crossed.error, NoBlocks)
    assert crossed.frames == 3


def test_heartbeats_are_no_messages():
    """They only prove life."""
    assert command_from_wire(wire.PushCommand(heartbeat=wire.Heartbeat())) is None
    assert reply_from_wire(wire.PushEvent(heartbeat=wire.Heartbeat())) is None


BAD: Any = "text"


@pytest.mark.parametrize(
    "command",
    [
        wire.PushCommand(),
        wire.PushCommand(hello=wire.PairHello()),
        wire.PushCommand(canary=wire.Canary()),
        wire.PushCommand(open=wire.OpenTransfer(request_id=b"short", lease_token=b"k" * 16)),
        wire.PushCommand(open=wire.OpenTransfer(request_id=b"r" * 16, lease_token=b"k" * 15)),
        wire.PushCommand(span=wire.AnnounceSpan(transfer_id=b"")),
        wire.PushCommand(span=wire.AnnounceSpan(transfer_id=b"t" * 16, start=BAD)),
        wire.PushCommand(commit=wire.CommitTransfer(transfer_id=b"t" * 16, num_frames=1 << 33)),
        wire.PushCommand(abort=wire.AbortTransfer(transfer_id=BAD)),
    ],
)
def test_malformed_commands_are_the_peers_fault(command: Any):
    """Missing, misplaced, short, of another type, or out of range."""
    with pytest.raises(RemoteProtocolError):
        command_from_wire(command)


@pytest.mark.parametrize(
    "event",
    [
        wire.PushEvent(),
        wire.PushEvent(hello=wire.PairHello()),
        wire.PushEvent(refused=wire.TransferRefused(request_id=b"r" * 16, lease_token=b"k" * 16)),
        wire.PushEvent(credit=wire.TransferCredit(transfer_id=b"t" * 15)),
        wire.PushEvent(
            grant=wire.TransferGrant(
                request_id=b"r" * 16,
                lease_token=b"k" * 16,
                transfer_id=b"t" * 16,
                tag_base=(1 << 64) - 5,
            )
        ),
    ],
)
def test_malformed_events_are_the_peers_fault(event: Any):
    """A tag range that runs out of 64 bits is one of them."""
    with pytest.raises(RemoteProtocolError):
        reply_from_wire(event)


@given(st.lists(st.builds(WindowOffer, u32, st.binary(min_size=1, max_size=99), ids), max_size=5))
def test_windows_cross_unchanged(offers: list[WindowOffer]):
    """Through real bytes; none at all is an answer, too."""
    raw = bytes(windows_to_wire(offers))
    assert windows_from_wire(wire.PushEvent.parse(raw).windows) == offers


@pytest.mark.parametrize(
    "windows",
    [
        None,
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"", proof=b"p" * 16)]),
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"k" * 70_000, proof=b"p" * 16)]),
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"k", proof=b"p" * 15)]),
        wire.StagingWindows(windows=[wire.StagingWindow(slot=BAD, key=b"k", proof=b"p" * 16)]),
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"k", proof=b"p" * 16)] * 5000),
    ],
)
def test_malformed_windows_are_the_peers_fault(windows: Any):
    """Missing, without a key, with a proof that proves nothing, or far too many."""
    with pytest.raises(RemoteProtocolError):
        windows_from_wire(windows)


def an_identity(**changes: Any) -> PairIdentity:
    fingerprint = changes.pop("fingerprint", b"f" * 32)
    dtype = changes.pop("dtype", "float16")
    spec = ModelSpec(
        name="m",
        fingerprint=fingerprint,
        vocab_size=8,
        max_model_len=64,
        eos_token_ids=frozenset(),
        dtype="float16",
    )
    layout = KvLayout(dtype=dtype, num_layers=2, num_kv_heads=1, head_dim=8)
    whole = PairIdentity(Incarnation(9), "1", spec, layout, b"address", 1000, 5000, b"h" * 16)
    return whole._replace(**changes)


def test_the_smaller_limits_count():
    """Both ends come to the same rule, whichever way round."""
    one, other = an_identity(), an_identity(group_bytes=10, max_frame_bytes=9000)
    terms = agree(one, hello_to_wire(wire.Role.DECODE, other), wire.Role.DECODE)
    same = agree(other, hello_to_wire(wire.Role.PREFILL, one), wire.Role.PREFILL)
    assert terms.rule == same.rule
    assert (terms.rule.group_bytes, terms.rule.max_frame_bytes) == (10, 5000)
    assert (terms.peer, terms.transport_address, terms.host) == (9, b"address", b"h" * 16)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fingerprint": b"x" * 32}, "model_fingerprint"),
        ({"dtype": "bfloat16"}, "kv_layout"),
        ({"max_frame_bytes": 70}, "max_frame_bytes"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], code: str):
    """Two workers that must not exchange KV find out in the handshake."""
    theirs = hello_to_wire(wire.Role.DECODE, an_identity(**changes))
    with pytest.raises(IncompatiblePeer) as caught:
        agree(an_identity(), theirs, wire.Role.DECODE)
    assert caught.value.code == code


def test_an_incomplete_or_misplaced_hello_is_refused():
    """Nothing, a missing part, the wrong role, no address."""
    mine = an_identity()
    whole = hello_to_wire(wire.Role.DECODE, mine)
    with pytest.raises(RemoteProtocolError):
        agree(mine, None, wire.Role.DECODE)
    with pytest.raises(RemoteProtocolError):
        agree(mine, whole, wire.Role.PREFILL)
    for name, value in (("model", None), ("layout", None), ("hello", None)):
        broken = hello_to_wire(wire.Role.DECODE, mine)
        setattr(broken, name, value)
        with pytest.raises(RemoteProtocolError):
            agree(mine, broken, wire.Role.DECODE)
    whole.transport_address = b""
    with pytest.raises(RemoteProtocolError):
        agree(mine, whole, wire.Role.DECODE)


def test_what_a_canary_says_of_its_lane_is_checked():
    """A name becomes a label; a certainty of a later release counts as the highest known."""
    canary = wire.Canary(lane="cuda_copy+tcp/eth0", certainty=99)
    assert finding_of(canary) == LaneFinding("cuda_copy+tcp/eth0", Certainty.KNOWN)
    assert lane_of(wire.CanaryResult(lane="sysv")) == "sysv"
    with pytest.raises(RemoteProtocolError):
        finding_of(wire.Canary(lane='sysv"} 1'))
    with pytest.raises(RemoteProtocolError):
        lane_of(wire.CanaryResult(lane="x" * 201))
