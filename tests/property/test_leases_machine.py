"""Leases under any order of reservations, opens, aborts, losses and time: no block in two hands,
nobody forgotten."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import LeaseLost, RemoteProtocolError, WorkerLost
from shared.ids import Incarnation, RequestId
from shared.kv.pool import BlockPool, BlockTable
from shared.schedule.sequence import Sequence
from shared.transfer.messages import TransferKey
from shared.worker.core.lease import (
    AbortReceive,
    Effect,
    GrantLease,
    Lease,
    LeasePolicy,
    LeaseState,
    MakeRoom,
    Refuse,
    RefuseOpen,
)
from shared.worker.core.leases import Leases
from tests.support.cores import an_item

POLICY = LeasePolicy(open_wait_s=5.0, growth_tokens=2, max_waiting=3, max_leases=5)
GONE = WorkerLost("gone")
PREFILLS = st.sampled_from([Incarnation(1), Incarnation(2)])
KEYS = st.builds(
    TransferKey,
    st.integers(0, 5).map(lambda number: RequestId(bytes([number]) * 16)),
    st.integers(0, 1),
)


class LeasesMachine(RuleBasedStateMachine):
    """The shell, played by chance: it performs effects late, and the world does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 2)
        self.leases = Leases(self.pool, POLICY)
        self.now = 0.0
        self.known: list[Lease] = []
        self.told: dict[int, list[type[Effect]]] = {}
        self.granted: list[Lease] = []
        self.writing: list[Lease] = []  # receives may still write these leases' blocks
        self.sequences: list[Sequence] = []
        self.foreign: list[BlockTable] = []

    def perform(self, effects: list[Effect]) -> None:
        """Check each effect against what may be said now."""
        for effect in effects:
            match effect:
                case GrantLease(lease):
                    assert self.told[id(lease)] == []
                    assert lease.wait_s <= lease.give_up_at - lease.reserved_at
                    self.granted.append(lease)
                case Refuse(lease):
                    assert Refuse not in self.told[id(lease)]
                    if lease.state in (LeaseState.GRANTED, LeaseState.OPEN):  # it gives way
                        self.perform(self.leases.cancel(lease, GONE, now=self.now))
                    assert lease.state in (LeaseState.RELEASED, LeaseState.ABORTING)
                case RefuseOpen(lease):
                    # Said of those who were never opened, once: an open waits, or still comes.
                    assert lease not in self.writing
                    assert RefuseOpen not in self.told[id(lease)]
                case AbortReceive(lease):
                    assert AbortReceive not in self.told[id(lease)]
                    assert lease in self.writing
                    assert lease.state is LeaseState.ABORTING
                case MakeRoom(num_tokens):
                    assert num_tokens > 0
                    continue
            self.told[id(effect.lease)].append(type(effect))

    def some(self, data: st.DataObject, *states: LeaseState) -> Lease | None:
        """Draw a lease in one of the states."""
        fitting = [lease for lease in self.known if lease.state in states]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    # --- the gateway -------------------------------------------------------------------------

    @rule(
        key=KEYS,
        prefill=PREFILLS,
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=18).map(tuple),
        max_tokens=st.integers(1, 8),
        wait_s=st.sampled_from([0.0, 1.0, 30.0]),
    )
    def reserve(
        self,
        key: TransferKey,
        prefill: Incarnation,
        prompt: tuple[int, ...],
        max_tokens: int,
        wait_s: float,
    ) -> None:
        """A reservation is granted, refused or waits."""
        live = [
            lease
            for lease in self.known
            if lease.key == key and lease.state not in (LeaseState.RELEASED, LeaseState.JOINED)
        ]
        item = an_item(prompt, max_tokens=max_tokens)
        try:
            lease, effects = self.leases.reserve(key, item, prefill, now=self.now, wait_s=wait_s)
        except RemoteProtocolError:
            assert live
            return
        assert not live
        self.known.append(lease)
        self.told[id(lease)] = []
        self.perform(effects)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """The gateway gives up, in whatever state."""
        lease = data.draw(st.sampled_from(self.known))
        self.perform(self.leases.cancel(lease, GONE, now=self.now))
        assert lease.state not in (LeaseState.WAITING, LeaseState.GRANTED, LeaseState.OPEN)

    # --- prefill -----------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(data=st.data(), prefill=PREFILLS)
    def open(self, data: st.DataObject, prefill: Incarnation) -> None:
        """Some prefill worker opens something."""
        lease = data.draw(st.sampled_from(self.known))
        before = lease.state
        try:
            is_open = self.leases.open(lease, prefill)
        except LeaseLost:
            assert lease.source != prefill
        except RemoteProtocolError:
            assert before not in (LeaseState.WAITING, LeaseState.GRANTED)
        else:
            assert is_open == (before is LeaseState.GRANTED)
            if is_open:
                self.writing.append(lease)

    @rule(data=st.data())
    def open_granted(self, data: st.DataObject) -> None:
        """The right prefill worker opens its lease."""
        lease = self.some(data, LeaseState.GRANTED)
        if lease is not None:
            assert self.leases.open(lease, lease.source)
            self.writing.append(lease)

    @rule(prefill=PREFILLS)
    def lose(self, prefill: Incarnation) -> None:
        """The last pair with it ends; its transfers report for themselves."""
        self.perform(self.leases.lose_source(prefill, GONE, now=self.now))
        for lease in [lease for lease in self.known if lease.source == prefill]:
            assert lease.state not in (LeaseState.WAITING, LeaseState.GRANTED)
            self.perform(self.leases.cancel(lease, GONE, now=self.now))

    # --- the receiver ------------------------------------------------------------------------

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """All KV of an open lease is placed."""
        lease = self.some(data, LeaseState.OPEN)
        if lease is None:
            return
        sequence = self.leases.join(lease, 7)
        self.writing.remove(lease)
        assert sequence.table is not None
        assert sequence.chain is not None
        stop = sequence.num_computed_tokens
        self.pool.publish(sequence.table, sequence.chain, sequence.tokens, stop)
        self.sequences.append(sequence)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """Receives of an aborted lease are not settled."""
        lease = self.some(data, LeaseState.ABORTING)
        if lease is not None:
            self.leases.begin_quarantine(lease)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Receives of an aborted lease are settled."""
        lease = self.some(data, LeaseState.ABORTING, LeaseState.QUARANTINED)
        if lease is None:
            return
        self.writing.remove(lease)
        self.perform(self.leases.settled(lease, now=self.now))

    # --- time and others ---------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 5.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and the shell wakes when it was told to, not more often."""
        end = self.now + seconds
        while (due := self.leases.next_tick_at) is not None and due <= end:
            self.now = max(self.now, due)
            self.perform(self.leases.tick(now=self.now))
            after = self.leases.next_tick_at
            assert after is None or after > self.now
        self.now = end

    @rule(num=st.integers(1, 4), claim=st.integers(0, 2))
    def disturb(self, num: int, claim: int) -> None:
        """The scheduler takes blocks, and speaks for some."""
        chain = self.pool.new_chain(b"running")
        table = self.pool.acquire(chain, [1] * (2 * num), 2 * num, max_hit_tokens=0)
        if table is not None:
            self.foreign.append(table)
        self.pool.claim(claim)
        self.perform(self.leases.grant_waiting(now=self.now))

    @rule(rests=st.booleans())
    def plan(self, rests: bool) -> None:
        """The scheduler begins a step, or nobody of its sequences has room."""
        if rests:
            self.leases.rests(now=self.now)
        else:
            self.leases.steps()

    @rule()
    def calm(self) -> None:
        """The scheduler's sequences end."""
        for sequence in self.sequences:
            assert sequence.table is not None
            self.pool.release(sequence.table)
        for table in self.foreign:
            self.pool.release(table)
        self.sequences, self.foreign = [], []
        self.pool.claim(0)
        self.perform(self.leases.grant_waiting(now=self.now))

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def counts_hold(self) -> None:
        """reserved = freed + joined + live + quarantined; every table is somebody's."""
        self.leases.check_integrity()
        tables = [seq.table for seq in self.sequences if seq.table is not None]
        self.pool.check_integrity([*self.leases.tables(), *tables, *self.foreign])
        stats = self.leases.statistics()
        assert stats.num_waiting <= POLICY.max_waiting

    @invariant()
    def nobody_else_holds_what_may_be_written(self) -> None:
        """Blocks beyond the skipped prefix belong to one lease alone while receives may write."""
        everybody = [*self.leases.tables(), *self.foreign]
        everybody += [seq.table for seq in self.sequences if seq.table is not None]
        for lease in self.writing:
            assert lease.table is not None
            mine = set(lease.block_table[lease.skip_tokens // 2 :])
            for table in everybody:
                assert table is lease.table or not mine & set(table.blocks)

    @invariant()
    def room_is_not_left_unused(self) -> None:
        """The first of those who wait does not fit, or too many hold leases."""
        waiting = [lease for lease in self.known if lease.state is LeaseState.WAITING]
        stats = self.leases.statistics()
        num_held = stats.num_granted + stats.num_open + stats.num_quarantined
        if not waiting or num_held >= POLICY.max_leases:
            return
        most = self.pool.num_blocks_for(waiting[0].num_tokens + POLICY.growth_tokens)
        left = self.pool.num_available - min(most, self.pool.num_blocks)
        assert left < self.pool.keep_free_for_newcomers

    @invariant()
    def grants_are_in_order(self) -> None:
        """First come, first served."""
        order = [self.known.index(lease) for lease in self.granted]
        assert order == sorted(order)

    def teardown(self) -> None:
        """Left alone, every lease ends and every block comes back."""
        self.calm()
        for lease in self.known:
            self.perform(self.leases.cancel(lease, GONE, now=self.now))
        for _ in range(3):
            self.wait(20.0)
            for lease in [*self.writing]:
                assert lease.state in (LeaseState.ABORTING, LeaseState.QUARANTINED)
                self.writing.remove(lease)
                if lease.state is LeaseState.ABORTING:
                    self.leases.begin_quarantine(lease)
                self.perform(self.leases.settled(lease, now=self.now))
        self.counts_hold()
        assert self.pool.num_held == 0
        for lease in self.known:
            assert lease.state in (LeaseState.RELEASED, LeaseState.JOINED)


TestLeasesMachine = LeasesMachine.TestCase
