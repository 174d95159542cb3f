"""Messages of ``Transfer.Push``, wire <-> domain, checked strictly.

What a peer sends is taken apart here once; whatever has a wrong length, range or shape raises
RemoteProtocolError. What the messages mean is ``shared/transfer``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shared import wire
from shared.errors import IncompatiblePeer, RemoteProtocolError
from shared.ids import ID_BYTES, Incarnation, LeaseToken, RequestId, TransferId
from shared.kv.layout import KvLayout
from shared.lanes import Certainty, LaneFinding, is_well_formed
from shared.messages import codec
from shared.model_spec import ModelSpec
from shared.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Credit,
    Grant,
    Open,
    PushMessage,
    PushReply,
    Refused,
    Span,
    TransferKey,
    WindowOffer,
)
from shared.transfer.plan import MAX_FRAMES, FrameRule

MAX_ADDRESS_BYTES = 1 << 16
MAX_WINDOWS = 4096
MAX_U32 = (1 << 32) - 1
MAX_U64 = (1 << 64) - 1


class PairIdentity(NamedTuple):
    """What this worker says of itself when two workers pair up."""

    incarnation: Incarnation
    version: str
    spec: ModelSpec
    layout: KvLayout
    transport_address: bytes
    group_bytes: int
    max_frame_bytes: int
    host: bytes


class PairTerms(NamedTuple):
    """What a handshake agreed on."""

    peer: Incarnation
    transport_address: bytes
    rule: FrameRule
    host: bytes
    engine: str


def hello_to_wire(role: wire.Role, it: PairIdentity) -> wire.PairHello:
    """Our half of the handshake."""
    return wire.PairHello(
        hello=wire.Hello(
            protocol_version=codec.PROTOCOL_VERSION,
            role=role,
            incarnation=it.incarnation,
            version=it.version,
        ),
        model=codec.model_to_wire(it.spec),
        layout=codec.layout_to_wire(it.layout),
        transport_address=it.transport_address,
        group_bytes=it.group_bytes,
        max_frame_bytes=it.max_frame_bytes,
        host=it.host,
    )


def agree(it: PairIdentity, theirs: wire.PairHello | None, role: wire.Role) -> PairTerms:
    """Compare both halves. role: what the peer must be.

    Of both frame limits the smaller one counts; a group is never larger than a frame.
    Raises IncompatiblePeer: protocol version, model or layout differ. RemoteProtocolError: the
    message is not a handshake.
    """
    hello = codec.require_hello(None if theirs is None else theirs.hello)
    if theirs is None or theirs.model is None or theirs.layout is None or hello.role != role:
        raise RemoteProtocolError("a pair must begin with a complete hello of the right role")
    model = codec.model_from_wire(theirs.model)
    if model.fingerprint != it.spec.fingerprint:
        raise IncompatiblePeer(
            f"the peer serves another model ({model.name!r}, this worker {it.spec.name!r}), "
            "or other weights under the same name: start both from the same folder",
            code="model_fingerprint",
        )
    it.layout.require_same(codec.layout_from_wire(theirs.layout), who="the peer")
    address: Any = theirs.transport_address
    if not isinstance(address, bytes) or not 0 < len(address) <= MAX_ADDRESS_BYTES:
        raise RemoteProtocolError("the peer gave no usable transport address")
    rule = FrameRule(
        layout=it.layout,
        group_bytes=max(1, min(it.group_bytes, _number(theirs.group_bytes, "group_bytes"))),
        max_frame_bytes=min(it.max_frame_bytes, _number(theirs.max_frame_bytes, "max_frame_bytes")),
    )
    return PairTerms(Incarnation(hello.incarnation), address, rule, theirs.host, model.engine)


def finding_of(canary: wire.Canary) -> LaneFinding:
    """What prefill knows of the lane. Raises RemoteProtocolError."""
    return LaneFinding(_lane(canary.lane), Certainty(min(canary.certainty, max(Certainty))))


def lane_of(result: wire.CanaryResult) -> str:
    """What both ends call the lane from now on. Raises RemoteProtocolError."""
    return _lane(result.lane)


def _lane(name: str) -> str:
    if not is_well_formed(name):
        raise RemoteProtocolError("the peer's lane has no name that may be one")
    return name


# --- prefill -> decode --------------------------------------------------------------------------


def command_to_wire(message: PushMessage) -> wire.PushCommand:
    """One control message to decode."""
    match message:
        case Open(key=key):
            return wire.PushCommand(
                open=wire.OpenTransfer(
                    request_id=key.request_id, attempt=key.attempt, lease_token=key.token
                )
            )
        case Span():
            return wire.PushCommand(
                span=wire.AnnounceSpan(
                    transfer_id=message.transfer_id, start=message.start, stop=message.stop
                )
            )
        case Commit():
            return wire.PushCommand(
                commit=wire.CommitTransfer(
                    transfer_id=message.transfer_id,
                    first_token=message.first_token,
                    num_frames=message.num_frames,
                )
            )
        case Abort():
            return wire.PushCommand(abort=_abort_to_wire(message))


def command_from_wire(command: wire.PushCommand) -> PushMessage | None:
    """Take a command apart; None for a heartbeat.

    Raises RemoteProtocolError: it is none of the messages that may come now, or malformed.
    """
    if command.heartbeat is not None:
        return None
    if command.open is not None:
        return Open(_key(command.open))
    if (span := command.span) is not None:
        return Span(
            _transfer_id(span.transfer_id),
            _number(span.start, "start"),
            _number(span.stop, "stop"),
        )
    if (commit := command.commit) is not None:
        return Commit(
            _transfer_id(commit.transfer_id),
            _number(commit.first_token, "first_token"),
            _number(commit.num_frames, "num_frames"),
        )
    if command.abort is not None:
        return _abort_from_wire(command.abort)
    raise RemoteProtocolError("an unknown or misplaced command on a pair stream")


# --- decode -> prefill --------------------------------------------------------------------------


def reply_to_wire(reply: PushReply) -> wire.PushEvent:
    """One control message to prefill."""
    match reply:
        case Grant():
            return wire.PushEvent(
                grant=wire.TransferGrant(
                    request_id=reply.key.request_id,
                    attempt=reply.key.attempt,
                    lease_token=reply.key.token,
                    transfer_id=reply.transfer_id,
                    epoch=reply.epoch,
                    tag_base=reply.tag_base,
                    skip_tokens=reply.skip_tokens,
                )
            )
        case Refused():
            return wire.PushEvent(
                refused=wire.TransferRefused(
                    request_id=reply.key.request_id,
                    attempt=reply.key.attempt,
                    lease_token=reply.key.token,
                    error=codec.error_to_wire(reply.error),
                )
            )
        case Credit():
            return wire.PushEvent(
                credit=wire.TransferCredit(
                    transfer_id=reply.transfer_id, frames=reply.frames, slots=list(reply.slots)
                )
            )
        case Ack():
            return wire.PushEvent(
                ack=wire.TransferAck(
                    transfer_id=reply.transfer_id, frames=reply.frames, done=reply.done
                )
            )
        case Abort():
            return wire.PushEvent(abort=_abort_to_wire(reply))


def reply_from_wire(event: wire.PushEvent) -> PushReply | None:
    """Take an event apart; None for a heartbeat.

    Raises RemoteProtocolError: it is none of the messages that may come now, or malformed.
    """
    if event.heartbeat is not None:
        return None
    if (grant := event.grant) is not None:
        return Grant(
            _key(grant),
            _transfer_id(grant.transfer_id),
            _number(grant.epoch, "epoch", MAX_U64),
            # All tags of the transfer must be tags.
            _number(grant.tag_base, "tag_base", MAX_U64 - MAX_FRAMES),
            _number(grant.skip_tokens, "skip_tokens"),
        )
    if (refused := event.refused) is not None:
        if refused.error is None:
            raise RemoteProtocolError("a refusal without a reason")
        return Refused(_key(refused), codec.error_from_wire(refused.error))
    if (credit := event.credit) is not None:
        return Credit(
            _transfer_id(credit.transfer_id),
            _number(credit.frames, "frames"),
            tuple(_number(slot, "slots") for slot in credit.slots),
        )
    if (ack := event.ack) is not None:
        return Ack(_transfer_id(ack.transfer_id), _number(ack.frames, "frames"), bool(ack.done))
    if event.abort is not None:
        return _abort_from_wire(event.abort)
    raise RemoteProtocolError("an unknown or misplaced event on a pair stream")


# --- windows ------------------------------------------------------------------------------------


def windows_to_wire(offers: Sequence[WindowOffer]) -> wire.PushEvent:
    """Decode's slots, for prefill to map."""
    windows = [wire.StagingWindow(slot=slot, key=key, proof=proof) for slot, key, proof in offers]
    return wire.PushEvent(windows=wire.StagingWindows(windows=windows))


def windows_from_wire(windows: wire.StagingWindows | None) -> list[WindowOffer]:
    """Raises RemoteProtocolError: none came, or what came is malformed."""
    if windows is None:
        raise RemoteProtocolError("decode said nothing about its staging windows")
    if len(windows.windows) > MAX_WINDOWS:
        raise RemoteProtocolError(f"more than {MAX_WINDOWS} windows", param="windows")
    return [_window(window) for window in windows.windows]


def _window(window: wire.StagingWindow) -> WindowOffer:
    key: Any = window.key
    proof: Any = window.proof
    if not isinstance(key, bytes) or not 0 < len(key) <= MAX_ADDRESS_BYTES:
        raise RemoteProtocolError("a window without a usable key", param="key")
    if not isinstance(proof, bytes) or len(proof) != ID_BYTES:
        raise RemoteProtocolError("a window's proof has 16 bytes", param="proof")
    return WindowOffer(_number(window.slot, "slot"), key, proof)


# --- inside -------------------------------------------------------------------------------------


def _abort_to_wire(abort: Abort) -> wire.AbortTransfer:
    return wire.AbortTransfer(
        transfer_id=abort.transfer_id,
        error=None if abort.error is None else codec.error_to_wire(abort.error),
        frames=abort.frames,
    )


def _abort_from_wire(abort: wire.AbortTransfer) -> Abort:
    error = None if abort.error is None else codec.error_from_wire(abort.error)
    return Abort(_transfer_id(abort.transfer_id), error, _number(abort.frames, "frames"))


def _transfer_id(raw: Any) -> TransferId:
    return TransferId(_id(raw, "transfer_id"))


def _key(message: wire.OpenTransfer | wire.TransferGrant | wire.TransferRefused) -> TransferKey:
    return TransferKey(
        RequestId(_id(message.request_id, "request_id")),
        _number(message.attempt, "attempt"),
        LeaseToken(_id(message.lease_token, "lease_token")),
    )


def _id(raw: Any, param: str) -> bytes:
    if not isinstance(raw, bytes) or len(raw) != ID_BYTES:
        raise RemoteProtocolError(f"must be {ID_BYTES} bytes", param=param)
    return raw


def _number(value: Any, param: str, most: int = MAX_U32) -> int:
    # The message library takes any number of any size in any field.
    if not isinstance(value, int) or not 0 <= value <= most:
        raise RemoteProtocolError(f"must be in 0..{most}", param=param)
    return value
