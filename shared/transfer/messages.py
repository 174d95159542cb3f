"""What source and sink of a transfer say to each other on their pair's stream, as plain records.

One record per message of ``proto/pdmesh/v1/transfer.proto``; ``shared/messages/transfer_codec.py``
moves them over the wire. Nothing here decides anything, and nothing here knows protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType, TypeAlias

from shared.errors import MeshError
from shared.ids import LeaseToken, RequestId, TransferId

LinkId = NewType("LinkId", int)
"""One life of one pair within this process; a reconnected peer gets a new one."""


class TransferKey(NamedTuple):
    """Names a transfer before it has an id: one attempt of one request, and what proves that its
    partner speaks. An open with another token meets no lease, and hinders none.

    Where a worker has several ranks, an attempt is several transfers, and their strand (which rank
    to which) belongs here: open, grant and refusal have a field number kept for it.
    """

    request_id: RequestId
    attempt: int
    token: LeaseToken


# --- source -> sink --------------------------------------------------------------------------


class Open(NamedTuple):
    """The source will push this attempt's KV as soon as the sink has room for it."""

    key: TransferKey


class Span(NamedTuple):
    """Tokens [start, stop) are about to be computed, or are cached. Both ends derive the frames
    (plan.py)."""

    transfer_id: TransferId
    start: int
    stop: int


class Commit(NamedTuple):
    """All spans are announced and the source has sampled the next token. ``num_frames`` counts the
    whole transfer."""

    transfer_id: TransferId
    first_token: int
    num_frames: int


class Abort(NamedTuple):
    """The source gave the transfer up, or answers ``StopSending``.

    error: None = a clean end, nothing went wrong (the answer needed no sink).
    frames: frames [0, frames) have been or will be sent, later ones never; the sink lets the former
    land and cancels the receives of the latter.
    """

    transfer_id: TransferId
    error: MeshError | None
    frames: int = 0


# --- sink -> source --------------------------------------------------------------------------


class WindowOffer(NamedTuple):
    """The sink's staging slot, to be mapped and written by the source. Shells alone use it.

    key: of the transport. proof: 16 random bytes that stand at its end, so that who has mapped it
    knows that it is the right memory.
    """

    slot: int
    key: bytes
    proof: bytes


class Grant(NamedTuple):
    """Room is reserved. Frame i travels on tag ``tag_base + i``; tokens [0, skip_tokens) are not
    sent."""

    key: TransferKey
    transfer_id: TransferId
    epoch: int
    tag_base: int
    skip_tokens: int


class Refused(NamedTuple):
    """There will be no room for this attempt here."""

    key: TransferKey
    error: MeshError


class Credit(NamedTuple):
    """Receives are posted for frames [0, frames): the source sends no other.

    slots: the sink's staging slots of the frames that the last credit did not have, in order. They
    matter where the source writes into the sink's slots by itself.
    """

    transfer_id: TransferId
    frames: int
    slots: tuple[int, ...]


class Ack(NamedTuple):
    """Frames [0, frames) are verified and placed. ``done`` = all of them, and the commit is
    here."""

    transfer_id: TransferId
    frames: int
    done: bool


class StopSending(NamedTuple):
    """The sink gave the transfer up; the source answers with ``Abort``."""

    transfer_id: TransferId
    error: MeshError


class Pull(NamedTuple):
    """The sink has room for the KV of these tokens: open a transfer under this key, with as many of
    them as your cache has. Shells alone use it. salt: the tenant's."""

    key: TransferKey
    token_ids: Sequence[int]
    salt: bytes


SourceMessage: TypeAlias = Open | Span | Commit | Abort
"""From the source to the sink."""

SinkMessage: TypeAlias = Grant | Refused | Credit | Ack | StopSending
"""From the sink to the source."""
