"""The orders that the two cores give to their shells, and how long each core is patient.

A shell performs effects in the order in which it gets them and decides nothing. Every order that
starts work (GatherAndSend, PostReceive, VerifyAndPlace) is answered by exactly one event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shared.errors import MeshError
from shared.ids import Incarnation, TransferId
from shared.transfer.messages import LinkId, SinkMessage, SourceMessage, TransferKey
from shared.transfer.plan import Frame

MAX_RESERVE_WAIT_S = 3600.0
"""Longest wait for blocks that a gateway may ask for, and so of an open for its grant: a prompt is
computed meanwhile, which may take long, or a client has the beginning of its answer."""

# --- both ends ----------------------------------------------------------------------------------


class CloseLink(NamedTuple):
    """Close the pair and its endpoint: the only way left to settle what does not settle."""

    link: LinkId
    reason: str


# --- the source ---------------------------------------------------------------------------------


class SendMessage(NamedTuple):
    """Put a control message on the pair stream, to the sink."""

    link: LinkId
    message: SourceMessage


class GatherAndSend(NamedTuple):
    """Gather the frame into the slot, write its header, send it on the tag.

    peer_slot: the sink's slot for it; where the source has that mapped, it is gathered into that,
    and the header alone is sent. Answer: ``send_settled``, also when gathering failed.
    """

    key: TransferKey
    link: LinkId
    transfer_id: TransferId
    epoch: int
    tag: int
    frame: Frame
    slot: int
    peer_slot: int


class EndTransfer(NamedTuple):
    """Tell the caller, once, that the source blocks are free.

    error: None = the sink has the KV, or was_needed is False and nothing had to be sent.
    """

    key: TransferKey
    error: MeshError | None
    was_needed: bool


SenderEffect: TypeAlias = SendMessage | GatherAndSend | EndTransfer | CloseLink


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderTiming:
    """Patience of the source, in seconds.

    open_s: the sink answers an open within this, however long its reservation may wait.
    stall_s: frames that have credit cross and are acknowledged, some of them within this.
    settle_s: sends settle within this once the transfer has ended, else the pair is closed.
    """

    open_s: float = MAX_RESERVE_WAIT_S + 10.0
    stall_s: float = 10.0
    settle_s: float = 5.0


# --- the sink -------------------------------------------------------------------------------------


class SendReply(NamedTuple):
    """Put a control message on the pair stream, to the source."""

    link: LinkId
    message: SinkMessage


class AskTerms(NamedTuple):
    """The source opened this transfer: ask the lease side for its terms.

    Answer: ``attached``, ``refused``, or ``must_wait``.
    """

    key: TransferKey
    source: Incarnation


class PostReceive(NamedTuple):
    """Post the receive of one frame into the slot. Answer: ``receive_settled``."""

    key: TransferKey
    link: LinkId
    frame: Frame
    slot: int
    tag: int


class CancelReceive(NamedTuple):
    """Ask for an early end of a posted receive. It is not the end: ``receive_settled`` is."""

    key: TransferKey
    frame_idx: int


class VerifyAndPlace(NamedTuple):
    """Check header and digest of the frame in the slot, then scatter it into the lease's blocks.

    Answer: ``frame_placed``, with the error if a check or the copy failed.
    """

    key: TransferKey
    transfer_id: TransferId
    epoch: int
    frame: Frame
    slot: int


class HandOver(NamedTuple):
    """All KV is in the blocks: the sequence may run. The blocks are its own from here.

    receive_s: first span announced until last frame placed. num_tokens: of a prefix that another
    worker had, so many; of a prompt all.
    """

    key: TransferKey
    first_token: int
    num_bytes: int
    num_frames: int
    receive_s: float
    num_tokens: int


class ReportFailure(NamedTuple):
    """Tell the lease side that the transfer failed. Its blocks are not free yet."""

    key: TransferKey
    error: MeshError


class QuarantineLease(NamedTuple):
    """Count the lease's blocks as quarantined: the transport may still write."""

    key: TransferKey


class ReleaseLease(NamedTuple):
    """Nothing touches the lease's blocks any more; they may be used again."""

    key: TransferKey


class EndLeases(NamedTuple):
    """No pair with this source is left: end its leases that have no transfer."""

    source: Incarnation
    error: MeshError


ReceiverEffect: TypeAlias = (
    SendReply
    | AskTerms
    | PostReceive
    | CancelReceive
    | VerifyAndPlace
    | HandOver
    | ReportFailure
    | QuarantineLease
    | ReleaseLease
    | EndLeases
    | CloseLink
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTiming:
    """Patience of the sink, in seconds.

    open_s: an open waits this long to be reserved for; from then on it waits with its reservation.
    stall_s: a posted frame whose KV is computed arrives within this, or another one does.
    settle_s: receives and copies of an ended transfer settle within this, else the pair is closed.
    """

    open_s: float = 5.0
    stall_s: float = 30.0
    settle_s: float = 5.0
