"""One worker as the gateway sees it: what it said at its join, its latest report, its session, and
what this gateway has ordered from it.

Pure; a worker is usable when it has joined, its session is up and it does not drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shared.ids import Incarnation, StreamId
from shared.kv.layout import KvLayout


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model that all workers of a mesh serve."""

    name: str
    fingerprint: bytes
    vocab_size: int
    max_model_len: int
    dtype: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's latest report; tokens and blocks are counts, ``step_s`` a moving mean.

    seen: by session, the last order of this gateway that the report counts.
    """

    pending_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    step_s: float = 0.0
    is_draining: bool = False
    paired: frozenset[Incarnation] = frozenset()
    seen: Mapping[Role, StreamId] = field(default_factory=dict[Role, StreamId])


@dataclass(slots=True)
class Order:
    """What one order asks of its worker: prompt tokens until they are computed, blocks to its
    end."""

    num_tokens: int
    num_blocks: int


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process.

    Its load is what it reported and those orders of this gateway that the report has not seen,
    added up anew from the open orders at each change: nothing is counted twice, and no counter can
    go astray.
    """

    role: Role
    incarnation: Incarnation
    host: str
    port: int
    model: ServedModel
    layout: KvLayout
    num_blocks: int
    block_size: int
    status: WorkerStatus = field(default_factory=WorkerStatus)
    has_session: bool = False
    is_suspect: bool = False
    bit: int = 0
    """This worker in ``partners`` of others; the peer table gives it."""
    partners: int = 0
    """The bits of the decode workers that this one may push to, usable or not."""
    orders: dict[Role, dict[StreamId, Order]] = field(
        default_factory=lambda: {role: {} for role in Role}
    )
    """By session: this gateway's orders that have not ended, in the order of their ids."""
    pending_tokens: int = field(init=False, default=0)
    """Prompt tokens queued or running here."""
    reserved_blocks: int = field(init=False, default=0)
    """Blocks taken here."""
    reserved_share: float = field(init=False, default=0.0)
    """The same as a share of all blocks."""

    def __post_init__(self) -> None:
        self._add_up()

    @property
    def is_colocated(self) -> bool:
        """Whether this decode worker is its own prefill worker, too: it is paired with itself."""
        return self.incarnation in self.status.paired

    @property
    def is_usable(self) -> bool:
        """Whether new work may be sent here."""
        return self.has_session and not self.is_suspect and not self.status.is_draining

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits here while nothing else is."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)

    # --- load -----------------------------------------------------------------------------------

    def report(self, status: WorkerStatus) -> None:
        """Take the worker's report."""
        self.status = status
        self._add_up()

    def sent(self, session: Role, stream_id: StreamId, *, num_tokens: int, num_blocks: int) -> None:
        """An order went out; ids of a session only grow."""
        self.orders[session][stream_id] = Order(num_tokens, num_blocks)
        self._add(session, stream_id, num_tokens, num_blocks)

    def computed(self, session: Role, stream_id: StreamId) -> None:
        """An order's prompt is computed. Idempotent."""
        order = self.orders[session].get(stream_id)
        if order is not None and order.num_tokens:
            self._add(session, stream_id, -order.num_tokens, 0)
            order.num_tokens = 0

    def ended(self, session: Role, stream_id: StreamId) -> None:
        """An order asks for nothing any more. Idempotent."""
        order = self.orders[session].pop(stream_id, None)
        if order is not None:
            self._add(session, stream_id, -order.num_tokens, -order.num_blocks)

    def lost(self, session: Role) -> None:
        """The session is gone, and with it all that was ordered over it."""
        self.orders[session].clear()
        self._add_up()

    def take_over(self, before: Worker) -> None:
        """This entry replaces an earlier one of the same process: what it sent stays open."""
        self.has_session, self.bit, self.orders = before.has_session, before.bit, before.orders
        self._add_up()

    def _add(self, session: Role, stream_id: StreamId, num_tokens: int, num_blocks: int) -> None:
        """Count what an order asks for, if the report has not seen it."""
        if stream_id > self.status.seen.get(session, 0):
            self.pending_tokens += num_tokens
            self.reserved_blocks += num_blocks
            self.reserved_share = self.reserved_blocks / max(1, self.num_blocks)

    def _add_up(self) -> None:
        status = self.status
        num_tokens, num_blocks = status.pending_tokens, status.reserved_blocks
        for session, orders in self.orders.items():
            seen = status.seen.get(session, 0)
            for stream_id in reversed(orders):
                if stream_id <= seen:
                    break
                order = orders[stream_id]
                num_tokens += order.num_tokens
                num_blocks += order.num_blocks
        self.pending_tokens, self.reserved_blocks = num_tokens, num_blocks
        self.reserved_share = num_blocks / max(1, self.num_blocks)
