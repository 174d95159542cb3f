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
    finding_of,
    hello_to_wire,
    lane_of,
    message_from_wire,
    message_to_wire,
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
    StopSending,
    TransferKey,
    WindowOffer,
)

u32 = st.integers(0, 2**32 - 1)
ids = st.binary(min_size=16, max_size=16).map(TransferId)
keys = st.builds(TransferKey, ids.map(RequestId), u32, ids.map(LeaseToken))
messages = st.one_of(
    st.builds(Open, keys),
    st.builds(Span, ids, u32, u32),
    st.builds(Commit, ids, u32, u32),
    st.builds(Abort, ids, st.none(), u32),
    st.builds(Grant, keys, ids, st.integers(0, 2**64 - 1), st.integers(0, 2**63), u32),
    st.builds(Credit, ids, u32, st.lists(u32, max_size=5).map(tuple)),
    st.builds(Ack, ids, u32, st.booleans()),
)


@given(messages)
def test_messages_cross_unchanged(message: Any):
    """Through real bytes."""
    assert crossed(message) == message


def crossed(message: Any) -> Any:
    """What comes out at the other end."""
    return message_from_wire(wire.PairMessage.parse(bytes(message_to_wire(message))))


def test_errors_cross_as_what_they_are():
    """Type, message and code survive; an abort without an error stays without."""
    error = NoBlocks("full", code="x")
    key = TransferKey(RequestId(b"r" * 16), 1, LeaseToken(b"k" * 16))
    transfer_id = TransferId(b"t" * 16)
    for said in (
        Refused(key, error),
        StopSending(transfer_id, error),
        Abort(transfer_id, error, 3),
    ):
        heard = crossed(said)
        assert type(heard) is type(said)
        assert isinstance(heard.error, NoBlocks)
        assert (heard.error.message, heard.error.code) == ("full", "x")
        assert heard._replace(error=error) == said


@pytest.mark.parametrize(
    "message",
    [
        wire.PairMessage(),
        wire.PairMessage(hello=wire.PairHello()),
        wire.PairMessage(canary=wire.Canary()),
        wire.PairMessage(open=wire.OpenTransfer(request_id=b"short", lease_token=b"k" * 16)),
        wire.PairMessage(open=wire.OpenTransfer(request_id=b"r" * 16, lease_token=b"k" * 15)),
        wire.PairMessage(span=wire.AnnounceSpan(transfer_id=b"")),
        wire.PairMessage(stop=wire.StopTransfer(transfer_id=b"t" * 16)),
        wire.PairMessage(refused=wire.TransferRefused(request_id=b"r" * 16, lease_token=b"k" * 16)),
        wire.PairMessage(credit=wire.TransferCredit(transfer_id=b"t" * 15)),
        wire.PairMessage(
            grant=wire.TransferGrant(
                request_id=b"r" * 16,
                lease_token=b"k" * 16,
                transfer_id=b"t" * 16,
                tag_base=(1 << 64) - 5,
            )
        ),
    ],
)
def test_malformed_messages_are_the_peers_fault(message: Any):
    """Missing, misplaced, short, or with tags that run out of 64 bits."""
    with pytest.raises(RemoteProtocolError):
        message_from_wire(message)


@given(st.lists(st.builds(WindowOffer, u32, st.binary(min_size=1, max_size=99), ids), max_size=5))
def test_windows_cross_unchanged(offers: list[WindowOffer]):
    """Through real bytes; none at all is an answer, too."""
    raw = bytes(windows_to_wire(offers))
    assert windows_from_wire(wire.PairMessage.parse(raw).windows) == offers


@pytest.mark.parametrize(
    "windows",
    [
        None,
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"", proof=b"p" * 16)]),
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"k" * 70_000, proof=b"p" * 16)]),
        wire.StagingWindows(windows=[wire.StagingWindow(key=b"k", proof=b"p" * 15)]),
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
    whole = PairIdentity(
        Incarnation(9), spec, layout, b"address", 1000, 5000, b"h" * 16, True, True
    )
    return whole._replace(**changes)


def test_the_smaller_limits_count():
    """Both ends come to the same rule, whichever way round."""
    one, other = an_identity(), an_identity(group_bytes=10, max_frame_bytes=9000)
    terms = agree(one, hello_to_wire(other))
    same = agree(other, hello_to_wire(one))
    assert terms.rule == same.rule
    assert (terms.rule.group_bytes, terms.rule.max_frame_bytes) == (10, 5000)
    assert (terms.peer, terms.transport_address, terms.host) == (9, b"address", b"h" * 16)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fingerprint": b"x" * 32}, "model_fingerprint"),
        ({"dtype": "bfloat16"}, "kv_layout"),
        ({"max_frame_bytes": 70}, "max_frame_bytes"),
        ({"pushes": False, "receives": False}, "no_direction"),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], code: str):
    """Two workers that must not exchange KV find out in the handshake."""
    theirs = hello_to_wire(an_identity(**changes))
    with pytest.raises(IncompatiblePeer) as caught:
        agree(an_identity(), theirs)
    assert caught.value.code == code


@pytest.mark.parametrize("ours", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("theirs", [(True, True), (True, False), (False, True)])
def test_kv_flows_from_who_pushes_to_who_receives(
    ours: tuple[bool, bool], theirs: tuple[bool, bool]
):
    """Both ends come to the same ways; two that only push, or only receive, are no pair."""
    one, other = (an_identity(pushes=way[0], receives=way[1]) for way in (ours, theirs))
    out, back = ours[0] and theirs[1], theirs[0] and ours[1]
    if not (out or back):
        with pytest.raises(IncompatiblePeer, match="neither"):
            agree(one, hello_to_wire(other))
        return
    mine, peers = agree(one, hello_to_wire(other)), agree(other, hello_to_wire(one))
    assert (mine.goes_out, mine.comes_in) == (peers.comes_in, peers.goes_out) == (out, back)


def test_an_incomplete_hello_is_refused():
    """Nothing, a missing part, no address."""
    mine = an_identity()
    whole = hello_to_wire(mine)
    with pytest.raises(RemoteProtocolError):
        agree(mine, None)
    for name, value in (("model", None), ("layout", None), ("hello", None)):
        broken = hello_to_wire(mine)
        setattr(broken, name, value)
        with pytest.raises(RemoteProtocolError):
            agree(mine, broken)
    whole.transport_address = b""
    with pytest.raises(RemoteProtocolError):
        agree(mine, whole)


def test_what_a_canary_says_of_its_lane_is_checked():
    """A name becomes a label; a certainty of a later release counts as the highest known."""
    canary = wire.Canary(lane="cuda_copy+tcp/eth0", certainty=99)
    assert finding_of(canary) == LaneFinding("cuda_copy+tcp/eth0", Certainty.KNOWN)
    assert lane_of(wire.CanaryResult(lane="sysv")) == "sysv"
    with pytest.raises(RemoteProtocolError):
        finding_of(wire.Canary(lane='sysv"} 1'))
    with pytest.raises(RemoteProtocolError):
        lane_of(wire.CanaryResult(lane="x" * 201))
