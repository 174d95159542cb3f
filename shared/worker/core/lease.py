"""Leases: decode's promises of room, from Reserve to the running batch. Records, and the table of
their moves.

waiting --room--> granted --opened--> open --placed--> joined (blocks belong to the sequence)

What is given up before it is open is released at once; later its blocks stay, *aborting* and then
*quarantined*, until no receive can write them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shared.errors import LocalProtocolError, MeshError
from shared.ids import Incarnation
from shared.kv.pool import BlockTable
from shared.kv.prefix_hash import PrefixChain
from shared.request import WorkItem
from shared.transfer.messages import TransferKey


class LeaseState(StrEnum):
    """Where a lease stands; see the drawing above."""

    WAITING = "waiting"  # holds nothing
    GRANTED = "granted"  # holds blocks, no transfer open
    OPEN = "open"  # frames may arrive
    ABORTING = "aborting"  # AbortReceive was ordered; receives may still write
    QUARANTINED = "quarantined"  # the same, and the receiver has taken note
    JOINED = "joined"  # blocks belong to a sequence
    RELEASED = "released"  # holds nothing


class LeaseEvent(StrEnum):
    """What can happen to a lease."""

    ROOM = "room"  # it is the oldest that waits, and the pool has its blocks
    OPENED = "opened"  # by the prefill worker that it names
    PLACED = "placed"  # all KV is here and verified
    GIVEN_UP = "given up"  # by the gateway, its transfer or a wait that is over
    UNSETTLED = "unsettled"  # its receive is aborted, and may still write
    SETTLED = "settled"  # nothing can write its blocks, and nobody needs them


_S, _E = LeaseState, LeaseEvent

MOVES: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.WAITING, _E.ROOM): _S.GRANTED,
    (_S.WAITING, _E.GIVEN_UP): _S.RELEASED,
    (_S.GRANTED, _E.OPENED): _S.OPEN,
    (_S.GRANTED, _E.GIVEN_UP): _S.RELEASED,
    (_S.OPEN, _E.PLACED): _S.JOINED,
    (_S.OPEN, _E.GIVEN_UP): _S.ABORTING,
    # A clean end by the source while frames are on their way: nobody gave the lease up.
    (_S.OPEN, _E.UNSETTLED): _S.QUARANTINED,
    (_S.ABORTING, _E.UNSETTLED): _S.QUARANTINED,
    **{
        (state, _E.SETTLED): _S.RELEASED
        for state in (_S.WAITING, _S.GRANTED, _S.OPEN, _S.ABORTING, _S.QUARANTINED)
    },
}
"""Every move there is."""


@dataclass(slots=True, eq=False)
class Lease:
    """One reservation; identity is the object. Fields after ``state`` are set by the grant.

    skip_tokens: leading tokens whose KV this worker has already. expires_at: void then unless
    prefill has opened it.
    """

    key: TransferKey
    item: WorkItem
    source: Incarnation
    chain: PrefixChain = field(repr=False)
    reserved_at: float
    give_up_at: float
    state: LeaseState = LeaseState.WAITING
    skip_tokens: int = 0
    table: BlockTable | None = field(default=None, repr=False)
    granted_at: float = 0.0
    expires_at: float = 0.0

    def move(self, event: LeaseEvent) -> None:
        """Move by the table. Raises LocalProtocolError: it has no such move."""
        after = MOVES.get((self.state, event))
        if after is None:
            raise LocalProtocolError(f"{event.value} is not allowed on a {self.state.value} lease")
        self.state = after

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is to be received (those below ``skip_tokens`` are there already)."""
        return len(self.item.token_ids)

    @property
    def is_answer(self) -> bool:
        """Whether an answer follows here; else it is for a prefix, which may as well be
        computed."""
        return self.item.sampling.max_tokens > 1

    @property
    def block_table(self) -> array[int]:
        """Physical blocks; empty while it holds none."""
        return self.table.blocks if self.table is not None else array("i")

    @property
    def wait_s(self) -> float:
        """Seconds from Reserve to the grant."""
        return self.granted_at - self.reserved_at


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Tell the gateway that the room is promised (Granted)."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the gateway that the reservation failed or was lost (OrderFailed)."""

    lease: Lease
    error: MeshError


@dataclass(frozen=True, slots=True)
class RefuseOpen:
    """There will be no room: refuse the OpenTransfer for this lease, which waits or still comes."""

    lease: Lease
    error: MeshError


@dataclass(frozen=True, slots=True)
class AbortReceive:
    """Abort the receiver of an open lease; call ``begin_quarantine`` while something may still
    write its blocks, and ``settled`` when nothing can."""

    lease: Lease
    error: MeshError


@dataclass(frozen=True, slots=True)
class MakeRoom:
    """Give up the newest prompts that are computed here and wait for room elsewhere, until so many
    tokens' KV is free."""

    num_tokens: int
    error: MeshError


Effect = GrantLease | Refuse | RefuseOpen | AbortReceive | MakeRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """Times and bounds.

    open_wait_s: how long a grant waits for its OpenTransfer. stuck_s: how long nothing runs for
    want of room until leases give way. growth_tokens: room beyond the prompt that a grant includes.
    max_waiting, max_leases: bounds of what is kept.
    """

    open_wait_s: float = 5.0
    stuck_s: float = 2.0
    growth_tokens: int = 16
    max_waiting: int = 1024
    max_leases: int = 1024


class LeaseStatistics(NamedTuple):
    """Gauges, then block counters since start: ``reserved = freed + joined + live + quarantined``.
    Blocks of a cached beginning, which several may hold, are not among them.

    num_live_blocks: of granted and open leases; num_quarantined_blocks: of aborting and quarantined
    ones."""

    num_waiting: int
    num_granted: int
    num_open: int
    num_quarantined: int
    num_live_blocks: int
    num_quarantined_blocks: int
    num_reserved_blocks: int
    num_freed_blocks: int
    num_joined_blocks: int
