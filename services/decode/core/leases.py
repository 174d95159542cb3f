"""The ledger of all leases: who gets blocks, when, and who gives them back. Pure.

Nothing is ever half granted: a waiter holds no block (no hold-and-wait), and first come is first
served. Blocks of an aborted receive are *quarantined* until the shell says that no receive can
write them any more. Knows no network and no clock: ``now`` is an argument, and what is to be told
to whom comes back as effects (reliability I1, fault 18).
"""

from __future__ import annotations

from collections import Counter

from services.decode.core.lease import (
    FRAMES_PER_TRANSFER,
    AbortReceive,
    AnswerOpen,
    Effect,
    Grant,
    Lease,
    LeaseKey,
    LeasePolicy,
    LeaseState,
    LeaseStatistics,
    Refuse,
    RefuseOpen,
)
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
from shared.ids import Incarnation, RandomBytes, TransferId
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.sequence import Sequence
from shared.request import WorkItem


class Leases:
    """All leases of one decode worker. Methods that take ``now`` return effects in the order to
    perform them."""

    def __init__(self, pool: BlockPool, policy: LeasePolicy, random_bytes: RandomBytes) -> None:
        self._pool = pool
        self._policy = policy
        self._random_bytes = random_bytes
        self._leases: dict[LeaseKey, Lease] = {}
        self._waiting: dict[LeaseKey, Lease] = {}  # first come first; each is in _leases too
        self._opens: dict[tuple[LeaseKey, Incarnation], float] = {}
        self._epoch = 0
        # A random start, so that a frame sent to an earlier life of this address finds no receive.
        self._next_tag = int.from_bytes(random_bytes(5), "little") * FRAMES_PER_TRANSFER
        self._num_reserved_blocks = 0
        self._num_freed_blocks = 0
        self._num_joined_blocks = 0

    # --- the gateway's side --------------------------------------------------------------------

    def reserve(
        self, key: LeaseKey, item: WorkItem, prefill: Incarnation, *, now: float, wait_s: float
    ) -> tuple[Lease, list[Effect]]:
        """Promise room for the item's KV, now or within ``wait_s``; only ``prefill`` may push.

        Effects: Grant, or Refuse (NoCapacity: larger than the pool; NoBlocks: nothing free in time;
        Overloaded: too many wait), or nothing yet. Raises RemoteProtocolError: the key is in use.
        """
        if key in self._leases:
            raise RemoteProtocolError("this attempt has a reservation already", code="reserved")
        lease = Lease(
            key,
            item,
            prefill,
            self._pool.new_chain(item.cache_salt),
            reserved_at=now,
            give_up_at=now + wait_s,
        )
        self._leases[key] = lease
        effects = self._refuse_strangers(lease)
        num_needed = self._pool.num_blocks_for(lease.num_tokens + min(1, _num_growth(item)))
        if num_needed > self._pool.num_blocks:
            return lease, effects + self._refuse(lease, self._larger_than_pool(lease))
        self._waiting[key] = lease
        effects += self.grant_waiting(now=now)
        if lease.state is LeaseState.WAITING:
            if wait_s <= 0:
                effects += self._refuse(lease, _no_blocks())
            elif len(self._waiting) > self._policy.max_waiting:
                error = Overloaded(
                    f"{self._policy.max_waiting} reservations wait for KV blocks already",
                    code="too_many_reservations",
                )
                effects += self._refuse(lease, error)
        return lease, effects

    def cancel(self, lease: Lease, error: MeshError, *, now: float) -> list[Effect]:
        """The gateway gave up (CancelDecode, its session ended) or the transfer failed. Allowed in
        every state.

        An open lease gives AbortReceive; others are freed at once. The gateway is not told: the
        caller does that.
        """
        if lease.state is LeaseState.WAITING:
            return [*self._end(lease, error), *self.grant_waiting(now=now)]
        if lease.state is LeaseState.GRANTED:
            return self.release(lease, now=now)
        if lease.state is LeaseState.OPEN:
            return [self._abort(lease, error)]
        return []

    # --- the prefill worker's side -------------------------------------------------------------

    def open(self, key: LeaseKey, prefill: Incarnation, *, now: float) -> list[Effect]:
        """A prefill worker asks for its lease; it may ask before the gateway reserves."""
        lease = self._leases.get(key)
        if lease is not None and lease.prefill != prefill:
            return [RefuseOpen(key, prefill, _not_yours())]
        if lease is not None and lease.state is LeaseState.GRANTED:
            return [self._open(lease, now)]
        if lease is not None and lease.state is not LeaseState.WAITING:
            error = RemoteProtocolError("this transfer was opened before", code="opened_twice")
            return [RefuseOpen(key, prefill, error)]
        if len(self._opens) >= self._policy.max_opens and (key, prefill) not in self._opens:
            error = Overloaded("too many transfers wait for a reservation", code="too_many_opens")
            return [RefuseOpen(key, prefill, error)]
        self._opens.setdefault((key, prefill), now)
        return []

    def renew(self, prefill: Incarnation, *, now: float) -> None:
        """The prefill worker gave a sign of life: its open leases live ``ttl_s`` from now."""
        for lease in self._leases.values():
            if lease.prefill == prefill and lease.state is LeaseState.OPEN:
                lease.expires_at = now + self._policy.ttl_s

    def lose_prefill(self, prefill: Incarnation, error: MeshError, *, now: float) -> list[Effect]:
        """The pair's stream ended: refuse and abort its open leases, forget its pending opens.

        Leases that it did not open yet stay: it may come back in time, and they expire by the
        clock.
        """
        self._opens = {asked: at for asked, at in self._opens.items() if asked[1] != prefill}
        effects: list[Effect] = []
        for lease in self._leases.values():
            if lease.prefill == prefill and lease.state is LeaseState.OPEN:
                effects += [Refuse(lease, error), self._abort(lease, error)]
        return effects

    # --- the receiver's side -------------------------------------------------------------------

    def join(self, lease: Lease, first_token: int) -> Sequence:
        """All KV is placed and verified: hand the blocks over to a sequence for
        ``Scheduler.add_ready``.

        Raises LocalProtocolError: the lease is not open.
        """
        self._require(lease, LeaseState.OPEN)
        assert lease.table is not None
        sequence = Sequence(lease.item)
        sequence.tokens.append(first_token)
        sequence.num_computed_tokens = lease.num_tokens
        sequence.num_cached_tokens = lease.skip_tokens
        sequence.table, sequence.chain = lease.table, lease.chain
        self._num_joined_blocks += len(lease.table.blocks)
        lease.table = None
        lease.state = LeaseState.JOINED
        del self._leases[lease.key]
        return sequence

    def release(self, lease: Lease, *, now: float) -> list[Effect]:
        """Free the blocks: nothing can write them any more and nobody needs them. Allowed twice.

        Raises LocalProtocolError: it is quarantined; only ``end_quarantine`` ends that.
        """
        if lease.state in (LeaseState.JOINED, LeaseState.RELEASED):
            return []
        if lease.state is LeaseState.QUARANTINED:
            raise LocalProtocolError("blocks in quarantine may still be written")
        gone = LeaseLost("the reservation was released", code="lease_released")
        return [*self._end(lease, gone), *self.grant_waiting(now=now)]

    def begin_quarantine(self, lease: Lease) -> None:
        """The receive is aborted but its operations are not settled: nobody gets these blocks."""
        self._require(lease, LeaseState.OPEN, LeaseState.ABORTING)
        lease.state = LeaseState.QUARANTINED

    def end_quarantine(self, lease: Lease, *, now: float) -> list[Effect]:
        """Every operation of the receive is settled and no scatter runs: free the blocks."""
        self._require(lease, LeaseState.QUARANTINED)
        lease.state = LeaseState.ABORTING
        return self.release(lease, now=now)

    # --- time and room -------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Effect]:
        """Expire what is due and grant what fits. Call at ``next_event_at``."""
        effects: list[Effect] = []
        for lease in [*self._leases.values()]:
            if lease.state is LeaseState.WAITING and lease.give_up_at <= now:
                effects += self._refuse(lease, _no_blocks())
            elif lease.state is LeaseState.GRANTED and lease.expires_at <= now:
                effects += self._refuse(lease, LeaseLost("prefill sent nothing", code="unopened"))
            elif lease.state is LeaseState.OPEN and lease.expires_at <= now:
                error = LeaseLost("the prefill worker went silent", code="silent")
                effects += [Refuse(lease, error), self._abort(lease, error)]
        effects += self._expire_opens(now)
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
            effects += self._grant(lease, now)
        return effects

    @property
    def next_event_at(self) -> float | None:
        """When ``tick`` has something to expire; None = never."""
        due = [at + self._policy.open_wait_s for at in self._due_opens().values()]
        for lease in self._leases.values():
            if lease.state is LeaseState.WAITING:
                due.append(lease.give_up_at)
            elif lease.state in (LeaseState.GRANTED, LeaseState.OPEN):
                due.append(lease.expires_at)
        return min(due, default=None)

    def allocate_tags(self) -> int:
        """Return the base of a fresh range of ``FRAMES_PER_TRANSFER`` tags, unique in this
        process's life."""
        base = self._next_tag
        self._next_tag += FRAMES_PER_TRANSFER
        return base

    # --- inner moves ---------------------------------------------------------------------------

    def _take_blocks(self, lease: Lease) -> bool:
        """Acquire the lease's blocks, cached prefix first; False if they are not free."""
        growth = min(self._policy.growth_tokens, _num_growth(lease.item))
        num_tokens = lease.num_tokens + growth
        lease.table = self._pool.acquire(
            lease.chain,
            lease.item.token_ids,
            min(num_tokens, self._pool.num_blocks * self._pool.block_size),
            max_hit_tokens=lease.num_tokens,
            keep_free=self._pool.keep_free_for_newcomers,
        )
        return lease.table is not None

    def _grant(self, lease: Lease, now: float) -> list[Effect]:
        assert lease.table is not None
        self._epoch += 1
        self._num_reserved_blocks += len(lease.table.blocks)
        lease.state = LeaseState.GRANTED
        lease.epoch = self._epoch
        lease.transfer_id = TransferId(self._random_bytes(16))
        lease.tag_base = self.allocate_tags()
        lease.skip_tokens = lease.table.num_hit_tokens
        lease.granted_at = now
        lease.expires_at = now + self._policy.open_wait_s
        if self._opens.pop((lease.key, lease.prefill), None) is None:
            return [Grant(lease)]
        return [Grant(lease), self._open(lease, now)]

    def _open(self, lease: Lease, now: float) -> Effect:
        lease.state = LeaseState.OPEN
        lease.expires_at = now + self._policy.ttl_s
        return AnswerOpen(lease)

    def _abort(self, lease: Lease, error: MeshError) -> Effect:
        lease.state = LeaseState.ABORTING
        return AbortReceive(lease, error)

    def _refuse(self, lease: Lease, error: MeshError) -> list[Effect]:
        return [Refuse(lease, error), *self._end(lease, error)]

    def _end(self, lease: Lease, error: MeshError) -> list[Effect]:
        """Forget the lease and free what it holds; refuse an OpenTransfer that waits for it."""
        self._waiting.pop(lease.key, None)
        del self._leases[lease.key]
        lease.state = LeaseState.RELEASED
        if lease.table is not None:
            self._num_freed_blocks += len(lease.table.blocks)
            self._pool.release(lease.table)
            lease.table = None
        if self._opens.pop((lease.key, lease.prefill), None) is None:
            return []
        return [RefuseOpen(lease.key, lease.prefill, error)]

    def _refuse_strangers(self, lease: Lease) -> list[Effect]:
        """Refuse those who asked for this lease before it was known for whom it is."""
        asked = [key_and_who for key_and_who in self._opens if key_and_who[0] == lease.key]
        effects: list[Effect] = []
        for key, prefill in asked:
            if prefill != lease.prefill:
                del self._opens[key, prefill]
                effects.append(RefuseOpen(key, prefill, _not_yours()))
        return effects

    def _due_opens(self) -> dict[tuple[LeaseKey, Incarnation], float]:
        """Opens without a reservation; one whose reservation waits for blocks waits with it."""
        return {asked: at for asked, at in self._opens.items() if asked[0] not in self._leases}

    def _expire_opens(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for (key, prefill), at in self._due_opens().items():
            if at + self._policy.open_wait_s <= now:
                del self._opens[key, prefill]
                error = LeaseLost("nobody reserved room for this transfer", code="unreserved")
                effects.append(RefuseOpen(key, prefill, error))
        return effects

    def _larger_than_pool(self, lease: Lease) -> NoCapacity:
        return NoCapacity(
            f"{lease.num_tokens} tokens of KV do not fit into this worker's "
            f"{self._pool.num_blocks * self._pool.block_size}: shorten the prompt or give decode "
            "workers more KV memory",
            code="kv_larger_than_pool",
        )

    def _require(self, lease: Lease, *states: LeaseState) -> None:
        if lease.state not in states:
            raise LocalProtocolError(f"not allowed on a {lease.state.value} lease")

    # --- looking at it -------------------------------------------------------------------------

    def statistics(self) -> LeaseStatistics:
        """Return all gauges and counters at once."""
        number = Counter(lease.state for lease in self._leases.values())
        blocks: Counter[LeaseState] = Counter()
        for lease in self._leases.values():
            blocks[lease.state] += len(lease.block_table)
        return LeaseStatistics(
            num_waiting=number[LeaseState.WAITING],
            num_granted=number[LeaseState.GRANTED],
            num_open=number[LeaseState.OPEN],
            num_quarantined=number[LeaseState.ABORTING] + number[LeaseState.QUARANTINED],
            num_pending_opens=len(self._opens),
            num_live_blocks=blocks[LeaseState.GRANTED] + blocks[LeaseState.OPEN],
            num_quarantined_blocks=blocks[LeaseState.ABORTING] + blocks[LeaseState.QUARANTINED],
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


def _not_yours() -> LeaseLost:
    return LeaseLost("the reservation names another prefill worker", code="other_prefill")
