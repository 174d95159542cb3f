"""The ledger of all leases: who gets blocks, when, and who gives them back. Pure.

Nothing is ever half granted: a waiter holds no block (no hold-and-wait), and first come is first
served. Blocks of an aborted receive are *quarantined* until the shell says that no receive can
write them any more. Knows no network, no transfer (ids, tags and waiting opens are
``shared/transfer/receivers.py``'s) and no clock: ``now`` is an argument, and what is to be told to
whom comes back as effects.
"""

from __future__ import annotations

from shared.errors import (
    InvariantViolated,
    LeaseLost,
    LocalProtocolError,
    MeshError,
    NoBlocks,
    NoCapacity,
    Overloaded,
    RemoteProtocolError,
)
from shared.ids import Incarnation
from shared.kv.pool import BlockPool, BlockTable
from shared.request import WorkItem
from shared.schedule.sequence import Sequence
from shared.transfer.messages import TransferKey
from shared.worker.core.lease import (
    AbortReceive,
    Effect,
    GrantLease,
    Lease,
    LeaseEvent,
    LeasePolicy,
    LeaseState,
    LeaseStatistics,
    MakeRoom,
    Refuse,
    RefuseOpen,
)


class Leases:
    """All leases of one decode worker. Methods that take ``now`` return effects in the order to
    perform them."""

    def __init__(self, pool: BlockPool, policy: LeasePolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._leases: dict[TransferKey, Lease] = {}
        self._waiting: dict[TransferKey, Lease] = {}  # first come first; each is in _leases too
        self._is_at_rest = False
        self._stuck_at: float | None = None
        self._num_reserved_blocks = 0
        self._num_freed_blocks = 0
        self._num_joined_blocks = 0

    # --- the gateway's side --------------------------------------------------------------------

    def reserve(
        self, key: TransferKey, item: WorkItem, source: Incarnation, *, now: float, wait_s: float
    ) -> tuple[Lease, list[Effect]]:
        """Promise room for the item's KV, now or within ``wait_s``; only ``prefill`` may push.

        Effects: GrantLease, or Refuse and RefuseOpen (NoCapacity: larger than the pool; NoBlocks:
        nothing free in time; Overloaded: too many wait), or nothing yet.
        Raises RemoteProtocolError: the key is in use.
        """
        if key in self._leases:
            raise RemoteProtocolError("this attempt has a reservation already", code="reserved")
        lease = Lease(
            key,
            item,
            source,
            self._pool.new_chain(item.cache_salt),
            reserved_at=now,
            give_up_at=now + wait_s,
        )
        self._leases[key] = lease
        # One token beyond the prompt is the least with which an answer can run; what
        # ``_num_tokens_to_take`` adds to it is no reason to refuse.
        num_needed = self._pool.num_blocks_for(lease.num_tokens + min(1, _num_growth(item)))
        if num_needed > self._pool.num_blocks:
            return lease, self._refuse(lease, self._larger_than_pool(lease))
        self._waiting[key] = lease
        effects = self.grant_waiting(now=now)
        if lease.state is LeaseState.WAITING:
            if wait_s <= 0:
                effects += self._refuse(lease, _no_blocks())
            elif len(self._waiting) > self._policy.max_waiting:
                error = Overloaded(
                    f"{self._policy.max_waiting} reservations wait for KV blocks already",
                    code="too_many_reservations",
                )
                effects += self._refuse(lease, error)
        # The stepper said so before this one came, and says it but once.
        if self._is_at_rest:
            self.rests(now=now)
        return lease, effects

    def cancel(self, lease: Lease, error: MeshError, *, now: float) -> list[Effect]:
        """The gateway gave up (CancelOrder, its session ended) or the transfer failed. Allowed in
        every state.

        An open lease gives AbortReceive; others are freed at once. The gateway is not told: the
        caller does that.
        """
        if lease.state in (LeaseState.WAITING, LeaseState.GRANTED):
            self._end(lease, LeaseEvent.GIVEN_UP)
            return [RefuseOpen(lease, error), *self.grant_waiting(now=now)]
        if lease.state is LeaseState.OPEN:
            lease.move(LeaseEvent.GIVEN_UP)
            return [AbortReceive(lease, error)]
        return []

    # --- the prefill worker's side -------------------------------------------------------------

    def open(self, lease: Lease, source: Incarnation) -> bool:
        """The prefill worker asks for its lease. True: it may push from now on, and the blocks are
        its transfer's until ``join`` or ``release``; False: the lease still waits for blocks.

        Raises LeaseLost: the lease is for another one. RemoteProtocolError: opened before.
        """
        if lease.source != source:
            raise LeaseLost("the reservation names another prefill worker", code="other_prefill")
        if lease.state is LeaseState.WAITING:
            return False
        if lease.state is not LeaseState.GRANTED:
            raise RemoteProtocolError("this transfer was opened before", code="opened_twice")
        lease.move(LeaseEvent.OPENED)
        return True

    def lose_source(self, source: Incarnation, error: MeshError, *, now: float) -> list[Effect]:
        """No pair with it is left: refuse its leases that have no transfer, for none will come.

        The end of an open one is its transfer's to tell (``cancel``).
        """
        effects: list[Effect] = []
        for lease in [*self._leases.values()]:
            has_no_transfer = lease.state in (LeaseState.WAITING, LeaseState.GRANTED)
            if lease.source == source and has_no_transfer:
                effects += self._refuse(lease, error)
        return effects + self.grant_waiting(now=now)

    # --- the receiver's side -------------------------------------------------------------------

    def join(self, lease: Lease, first_token: int) -> Sequence:
        """All KV is placed and verified: hand the blocks over to a sequence for
        ``Scheduler.add_ready``.

        Raises LocalProtocolError: the lease is not open.
        """
        lease.move(LeaseEvent.PLACED)
        assert lease.table is not None
        sequence = Sequence(lease.item)
        sequence.tokens.append(first_token)
        sequence.num_computed_tokens = lease.num_tokens
        sequence.num_cached_tokens = lease.skip_tokens
        sequence.table, sequence.chain = lease.table, lease.chain
        self._num_joined_blocks += self._num_own_blocks(lease.table)
        lease.table = None
        del self._leases[lease.key]
        return sequence

    def keep(self, lease: Lease, num_tokens: int, *, now: float) -> list[Effect]:
        """KV of so many tokens is placed and verified: leave it in the prefix cache, where the
        prompt that waits for it finds it."""
        if lease.table is not None:
            tokens = lease.item.token_ids
            self._pool.publish(lease.table, lease.chain, tokens, num_tokens)
        return self.release(lease, now=now)

    def release(self, lease: Lease, *, now: float) -> list[Effect]:
        """Free the blocks: nothing can write them any more and nobody needs them. Allowed twice.

        Raises LocalProtocolError: it is quarantined; only ``settled`` ends that.
        """
        if lease.state in (LeaseState.JOINED, LeaseState.RELEASED):
            return []
        if lease.state is LeaseState.QUARANTINED:
            raise LocalProtocolError("blocks in quarantine may still be written")
        self._end(lease, LeaseEvent.SETTLED)
        return self.grant_waiting(now=now)

    def begin_quarantine(self, lease: Lease) -> None:
        """The receive is aborted but its operations are not settled: nobody gets these blocks."""
        lease.move(LeaseEvent.UNSETTLED)

    def settled(self, lease: Lease, *, now: float) -> list[Effect]:
        """Every operation of the receive is settled and no scatter runs: free the blocks, also
        those in quarantine. Allowed twice."""
        if lease.state is not LeaseState.QUARANTINED:
            return self.release(lease, now=now)
        self._end(lease, LeaseEvent.SETTLED)
        return self.grant_waiting(now=now)

    # --- time and room -------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Effect]:
        """Expire what is due and grant what fits. Call at ``next_tick_at``."""
        effects: list[Effect] = []
        for lease in [*self._leases.values()]:
            if lease.state is LeaseState.WAITING and lease.give_up_at <= now:
                effects += self._refuse(lease, _no_blocks())
            elif lease.state is LeaseState.GRANTED and lease.expires_at <= now:
                effects += self._refuse(lease, LeaseLost("prefill sent nothing", code="unopened"))
        if self._stuck_at is not None and self._stuck_at <= now:
            self._stuck_at = None
            effects += self._give_way()
        return effects + self.grant_waiting(now=now)

    def grant_waiting(self, *, now: float) -> list[Effect]:
        """Grant what fits, oldest first, none overtaking. Call whenever the scheduler may have
        freed blocks."""
        effects: list[Effect] = []
        while self._waiting:
            lease = next(iter(self._waiting.values()))
            if len(self._leases) - len(self._waiting) >= self._policy.max_leases:
                break
            if not self._take_blocks(lease):
                break
            del self._waiting[lease.key]
            effects.append(self._grant(lease, now))
        return effects

    def steps(self) -> None:
        """A step runs here."""
        self._is_at_rest, self._stuck_at = False, None

    def rests(self, *, now: float) -> None:
        """None does: nobody is here, or nobody has room.

        The latter may last where workers do both: prompts here wait for room that leases hold, or
        reservations for room that computed prompts hold, and what holds it waits for room on
        workers that wait for this one. If it does, what holds it gives way.
        """
        self._is_at_rest = True
        if self._stuck_at is None and self._pool.num_lacking(self._num_wanted):
            self._stuck_at = now + self._policy.stuck_s

    def _give_way(self) -> list[Effect]:
        """The newest go, as many as hold what is lacking: their requests are tried again.

        With Overloaded and not NoBlocks, which would leave a request only what is left of its one
        wait for room (``Dispatcher.attempt_failed``).
        """
        error = Overloaded("the room was needed for what had come before", code="gave_way")
        effects: list[Effect] = []
        num_lacking = self._pool.num_lacking()
        for lease in reversed(self._leases.values()):
            if num_lacking > 0 and lease.state in (LeaseState.GRANTED, LeaseState.OPEN):
                num_lacking -= len(lease.block_table)
                effects.append(Refuse(lease, error))
        # Nothing was taken from leases: then a reservation may be what waits, for room that
        # computed prompts hold.
        if not effects:
            num_lacking = self._pool.num_lacking(self._num_wanted)
        if num_lacking > 0:
            effects.append(MakeRoom(num_lacking * self._pool.block_size, error))
        return effects

    @property
    def next_tick_at(self) -> float | None:
        """When ``tick`` has something to expire; None = never."""
        due: list[float] = [] if self._stuck_at is None else [self._stuck_at]
        for lease in self._leases.values():
            if lease.state is LeaseState.WAITING:
                due.append(lease.give_up_at)
            elif lease.state is LeaseState.GRANTED:
                due.append(lease.expires_at)
        return min(due, default=None)

    # --- inner moves ---------------------------------------------------------------------------

    @property
    def _num_wanted(self) -> int:
        """Blocks for the answer that is the next to have room; 0 = there is none, or it is a
        prefix."""
        lease = next(iter(self._waiting.values()), None)
        if lease is None or not lease.is_answer:
            return 0
        return self._pool.num_blocks_for(self._num_tokens_to_take(lease))

    def _take_blocks(self, lease: Lease) -> bool:
        """Acquire the lease's blocks, cached prefix first; False if they are not free."""
        lease.table = self._pool.acquire(
            lease.chain,
            lease.item.token_ids,
            self._num_tokens_to_take(lease),
            max_hit_tokens=lease.num_tokens,
            keep_free=self._pool.keep_free_for_answers
            if lease.is_answer
            else self._pool.keep_free_for_newcomers,
        )
        return lease.table is not None

    def _num_tokens_to_take(self, lease: Lease) -> int:
        growth = min(self._policy.growth_tokens, _num_growth(lease.item))
        return min(lease.num_tokens + growth, self._pool.num_blocks * self._pool.block_size)

    def _grant(self, lease: Lease, now: float) -> Effect:
        assert lease.table is not None
        self._num_reserved_blocks += self._num_own_blocks(lease.table)
        lease.move(LeaseEvent.ROOM)
        lease.skip_tokens = lease.table.num_hit_tokens
        lease.granted_at = now
        lease.expires_at = now + self._policy.open_wait_s
        return GrantLease(lease)

    def _refuse(self, lease: Lease, error: MeshError) -> list[Effect]:
        self._end(lease, LeaseEvent.GIVEN_UP)
        return [Refuse(lease, error), RefuseOpen(lease, error)]

    def _end(self, lease: Lease, event: LeaseEvent) -> None:
        """Forget the lease and free what it holds."""
        lease.move(event)
        self._waiting.pop(lease.key, None)
        del self._leases[lease.key]
        if lease.table is not None:
            self._num_freed_blocks += self._num_own_blocks(lease.table)
            self._pool.release(lease.table)
            lease.table = None

    def _num_own_blocks(self, table: BlockTable) -> int:
        """Those of a cached beginning are not counted: others may hold them, too."""
        return len(table.blocks) - table.num_hit_tokens // self._pool.block_size

    def _larger_than_pool(self, lease: Lease) -> NoCapacity:
        return NoCapacity(
            f"{lease.num_tokens} tokens of KV do not fit into this worker's "
            f"{self._pool.num_blocks * self._pool.block_size}: shorten the prompt or give decode "
            "workers more KV memory",
            code="kv_larger_than_pool",
        )

    # --- looking at it -------------------------------------------------------------------------

    @property
    def is_expecting(self) -> bool:
        """Whether a sequence may join soon: it has its blocks, and its prompt is computed elsewhere
        or on its way here."""
        states = (LeaseState.GRANTED, LeaseState.OPEN)
        return any(lease.state in states for lease in self._leases.values())

    @property
    def has_waiting(self) -> bool:
        """Whether a reservation waits for blocks."""
        return bool(self._waiting)

    def statistics(self) -> LeaseStatistics:
        """Return all gauges and counters at once."""
        num_granted = num_open = num_quarantined = num_live_blocks = num_quarantined_blocks = 0
        for lease in self._leases.values():
            if lease.table is None:
                continue
            num_blocks = self._num_own_blocks(lease.table)
            if lease.state in (LeaseState.GRANTED, LeaseState.OPEN):
                num_open += lease.state is LeaseState.OPEN
                num_granted += lease.state is LeaseState.GRANTED
                num_live_blocks += num_blocks
            else:
                num_quarantined += 1
                num_quarantined_blocks += num_blocks
        return LeaseStatistics(
            num_waiting=len(self._waiting),
            num_granted=num_granted,
            num_open=num_open,
            num_quarantined=num_quarantined,
            num_live_blocks=num_live_blocks,
            num_quarantined_blocks=num_quarantined_blocks,
            num_reserved_blocks=self._num_reserved_blocks,
            num_freed_blocks=self._num_freed_blocks,
            num_joined_blocks=self._num_joined_blocks,
        )

    def tables(self) -> list[BlockTable]:
        """Every block table that a lease holds, for ``BlockPool.check_integrity``."""
        return [lease.table for lease in self._leases.values() if lease.table is not None]

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless reserved = freed + joined + live + quarantined, counted
        afresh."""
        stats = self.statistics()
        total = (
            stats.num_freed_blocks
            + stats.num_joined_blocks
            + stats.num_live_blocks
            + stats.num_quarantined_blocks
        )
        if stats.num_reserved_blocks != total:
            raise InvariantViolated(
                f"lease ledger: {stats.num_reserved_blocks} reserved != "
                f"{stats.num_freed_blocks} freed + {stats.num_joined_blocks} joined + "
                f"{stats.num_live_blocks} live + {stats.num_quarantined_blocks} quarantined"
            )
        waiting = [lease for lease in self._leases.values() if lease.state is LeaseState.WAITING]
        if waiting != list(self._waiting.values()) or any(lease.table for lease in waiting):
            raise InvariantViolated("a waiting reservation holds blocks, or the queue lost one")


def _num_growth(item: WorkItem) -> int:
    """Positions beyond the prompt that decode may ever need: the last token's KV is never computed,
    and the first token comes from prefill."""
    return max(0, item.sampling.max_tokens - item.next_index - 1)


def _no_blocks() -> NoBlocks:
    return NoBlocks("no KV blocks came free in time", code="wait_over", retry_after_s=1.0)
