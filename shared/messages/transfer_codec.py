"""Messages of ``Transfer.Pair``, wire <-> domain, checked strictly.

What a peer sends is taken apart here once. Its types and the ranges of its numbers are right
already (``wire_format.py``); whatever has a wrong length or shape raises RemoteProtocolError. What
the messages mean is ``shared/transfer``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shared import wire
from shared.errors import IncompatiblePeer, MeshError, RemoteProtocolError
from shared.ids import ID_BYTES, Incarnation, TransferId
from shared.kv.layout import KvLayout
from shared.lanes import Certainty, LaneFinding, is_well_formed
from shared.messages import codec
from shared.messages.columns import pack_u32
from shared.model_spec import ModelSpec
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    Open,
    Pull,
    Refused,
    SinkMessage,
    SourceMessage,
    Span,
    StopSending,
    TransferKey,
    WindowOffer,
)
from shared.transfer.plan import MAX_FRAMES, FrameRule

MAX_ADDRESS_BYTES = 1 << 16
MAX_WINDOWS = 4096
MAX_U64 = (1 << 64) - 1


class PairIdentity(NamedTuple):
    """What this worker says of itself when two workers pair up."""

    incarnation: Incarnation
    spec: ModelSpec
    layout: KvLayout
    transport_address: bytes
    group_bytes: int
    max_frame_bytes: int
    host: bytes
    pushes: bool
    receives: bool


class PairTerms(NamedTuple):
    """What a handshake agreed on. goes_out, comes_in: which ways KV may flow."""

    peer: Incarnation
    transport_address: bytes
    rule: FrameRule
    host: bytes
    engine: str
    goes_out: bool
    comes_in: bool


def hello_to_wire(it: PairIdentity) -> wire.PairHello:
    """Our half of the handshake."""
    return wire.PairHello(
        hello=codec.own_hello(wire.Role.PREFILL if it.pushes else wire.Role.DECODE, it.incarnation),
        model=codec.model_to_wire(it.spec),
        layout=codec.layout_to_wire(it.layout),
        transport_address=it.transport_address,
        group_bytes=it.group_bytes,
        max_frame_bytes=it.max_frame_bytes,
        host=it.host,
        pushes=it.pushes,
        receives=it.receives,
    )


def agree(it: PairIdentity, theirs: wire.PairHello | None) -> PairTerms:
    """Compare both halves.

    Of both frame limits the smaller one counts; a group is never larger than a frame.
    Raises IncompatiblePeer: protocol version, model or layout differ, or neither of the two takes
    KV from the other. RemoteProtocolError: the message is not a handshake.
    """
    hello = codec.require_hello(None if theirs is None else theirs.hello)
    if theirs is None or theirs.model is None or theirs.layout is None:
        raise RemoteProtocolError("a pair must begin with a complete hello")
    model = codec.model_from_wire(theirs.model)
    if model.fingerprint != it.spec.fingerprint:
        raise IncompatiblePeer(
            f"the peer serves another model ({model.name!r}, this worker {it.spec.name!r}), "
            "or other weights under the same name: start both from the same folder",
            code="model_fingerprint",
        )
    it.layout.require_same(codec.layout_from_wire(theirs.layout), who="the peer")
    address = theirs.transport_address
    if not 0 < len(address) <= MAX_ADDRESS_BYTES:
        raise RemoteProtocolError("the peer gave no usable transport address")
    rule = FrameRule(
        layout=it.layout,
        group_bytes=max(1, min(it.group_bytes, theirs.group_bytes)),
        max_frame_bytes=min(it.max_frame_bytes, theirs.max_frame_bytes),
    )
    goes_out, comes_in = it.pushes and theirs.receives, it.receives and theirs.pushes
    if not (goes_out or comes_in):
        raise IncompatiblePeer("neither of the two takes KV from the other", code="no_direction")
    peer = Incarnation(hello.incarnation)
    return PairTerms(peer, address, rule, theirs.host, model.engine, goes_out, comes_in)


def finding_of(canary: wire.Canary) -> LaneFinding:
    """What the source knows of the lane. Raises RemoteProtocolError."""
    return LaneFinding(lane_of(canary), Certainty(min(canary.certainty, max(Certainty))))


def lane_of(message: wire.Canary | wire.CanaryResult) -> str:
    """What both ends call the lane. Raises RemoteProtocolError."""
    if not is_well_formed(message.lane):
        raise RemoteProtocolError("the peer's lane has no name that may be one")
    return message.lane


# --- source -> sink, sink -> source -------------------------------------------------------------


def message_to_wire(message: SourceMessage | SinkMessage | Pull) -> wire.PairMessage:
    """One message about a transfer."""
    match message:
        case Pull(key=key, token_ids=token_ids, salt=salt):
            column = pack_u32(token_ids)
            pull = wire.PullPrefix(**_names(key), token_ids=column, cache_salt=salt)
            return wire.PairMessage(pull=pull)
        case Open(key=key):
            return wire.PairMessage(open=wire.OpenTransfer(**_names(key)))
        case Span():
            return wire.PairMessage(span=wire.AnnounceSpan(**message._asdict()))
        case Commit():
            return wire.PairMessage(commit=wire.CommitTransfer(**message._asdict()))
        case Abort(transfer_id=transfer_id, error=error, frames=frames):
            raw = None if error is None else codec.error_to_wire(error)
            abort = wire.AbortTransfer(transfer_id=transfer_id, error=raw, frames=frames)
            return wire.PairMessage(abort=abort)
        case Grant(key=key):
            granted = codec.fields_of(message, ("transfer_id", "epoch", "tag_base", "skip_tokens"))
            return wire.PairMessage(grant=wire.TransferGrant(**_names(key), **granted))
        case Refused(key=key, error=error):
            refused = wire.TransferRefused(**_names(key), error=codec.error_to_wire(error))
            return wire.PairMessage(refused=refused)
        case Credit(transfer_id=transfer_id, frames=frames, slots=slots):
            credit = wire.TransferCredit(transfer_id=transfer_id, frames=frames, slots=list(slots))
            return wire.PairMessage(credit=credit)
        case Ack():
            return wire.PairMessage(ack=wire.TransferAck(**message._asdict()))
        case StopSending(transfer_id=transfer_id, error=error):
            raw = codec.error_to_wire(error)
            return wire.PairMessage(stop=wire.StopTransfer(transfer_id=transfer_id, error=raw))


def _names(key: TransferKey) -> dict[str, Any]:
    """The fields by which a message names an attempt's transfer (``codec.key_of``)."""
    return {"request_id": key.request_id, "attempt": key.attempt, "lease_token": key.token}


def message_from_wire(message: wire.PairMessage) -> SourceMessage | SinkMessage | Pull:
    """Take a message about a transfer apart.

    Raises RemoteProtocolError: it is none of those, or malformed.
    """
    if message.open is not None:
        return Open(codec.key_of(message.open))
    if (span := message.span) is not None:
        return Span(_transfer_id(span.transfer_id), span.start, span.stop)
    if (commit := message.commit) is not None:
        return Commit(_transfer_id(commit.transfer_id), commit.first_token, commit.num_frames)
    if (abort := message.abort) is not None:
        error = None if abort.error is None else codec.error_from_wire(abort.error)
        return Abort(_transfer_id(abort.transfer_id), error, abort.frames)
    if (grant := message.grant) is not None:
        return Grant(
            codec.key_of(grant),
            _transfer_id(grant.transfer_id),
            grant.epoch,
            _tag_base(grant.tag_base),
            grant.skip_tokens,
        )
    if (refused := message.refused) is not None:
        return Refused(codec.key_of(refused), _reason(refused.error))
    if (credit := message.credit) is not None:
        return Credit(_transfer_id(credit.transfer_id), credit.frames, tuple(credit.slots))
    if (ack := message.ack) is not None:
        return Ack(_transfer_id(ack.transfer_id), ack.frames, bool(ack.done))
    if (stop := message.stop) is not None:
        return StopSending(_transfer_id(stop.transfer_id), _reason(stop.error))
    if (pull := message.pull) is not None:
        return Pull(codec.key_of(pull), *codec.salted_tokens(pull))
    raise RemoteProtocolError("an unknown or misplaced message on a pair stream")


# --- windows ------------------------------------------------------------------------------------


def windows_to_wire(offers: Sequence[WindowOffer]) -> wire.PairMessage:
    """The sink's slots, for the source to map."""
    windows = [wire.StagingWindow(slot=slot, key=key, proof=proof) for slot, key, proof in offers]
    return wire.PairMessage(windows=wire.StagingWindows(windows=windows))


def windows_from_wire(windows: wire.StagingWindows | None) -> list[WindowOffer]:
    """Raises RemoteProtocolError: none came, or what came is malformed."""
    if windows is None:
        raise RemoteProtocolError("the sink said nothing about its staging windows")
    if len(windows.windows) > MAX_WINDOWS:
        raise RemoteProtocolError(f"more than {MAX_WINDOWS} windows", param="windows")
    return [_window(window) for window in windows.windows]


def _window(window: wire.StagingWindow) -> WindowOffer:
    if not 0 < len(window.key) <= MAX_ADDRESS_BYTES:
        raise RemoteProtocolError("a window without a usable key", param="key")
    if len(window.proof) != ID_BYTES:
        raise RemoteProtocolError("a window's proof has 16 bytes", param="proof")
    return WindowOffer(window.slot, window.key, window.proof)


# --- inside -------------------------------------------------------------------------------------


def _reason(error: wire.Error | None) -> MeshError:
    if error is None:
        raise RemoteProtocolError("a refusal without a reason", param="error")
    return codec.error_from_wire(error)


def _transfer_id(raw: bytes) -> TransferId:
    return TransferId(codec.checked_id(raw, "transfer_id"))


def _tag_base(value: int) -> int:
    """All tags of the transfer must be tags."""
    if value > MAX_U64 - MAX_FRAMES:
        raise RemoteProtocolError(
            f"tag_base must be in 0..{MAX_U64 - MAX_FRAMES}", param="tag_base"
        )
    return value
