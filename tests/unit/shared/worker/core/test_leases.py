"""Leases: every transition, what it tells to whom, and that no block is in two hands."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import (
    LeaseLost,
    LocalProtocolError,
    MeshError,
    NoBlocks,
    NoCapacity,
    Overloaded,
    RemoteProtocolError,
    WorkerLost,
)
from shared.ids import Incarnation, LeaseToken, RequestId
from shared.kv.pool import BlockPool
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

US, THEM = Incarnation(1), Incarnation(2)
GONE = WorkerLost("gone")


def a_key(number: int, attempt: int = 0) -> TransferKey:
    """The key of request ``number``."""
    return TransferKey(RequestId(number.to_bytes(16, "little")), attempt, LeaseToken(bytes(16)))


class Desk:
    """Leases of a pool of 8 blocks of 4 tokens."""

    def __init__(self, **policy: Any) -> None:
        policy.setdefault("growth_tokens", 1)
        self.pool = BlockPool(8, 4)
        self.leases = Leases(self.pool, LeasePolicy(**policy))
        self._joined: list[Sequence] = []

    def reserve(
        self, number: int = 0, *, prompt: int = 7, now: float = 0.0, wait_s: float = 1.0, **kw: Any
    ) -> tuple[Lease, list[Effect]]:
        """Reserve for a prompt of its own."""
        tokens = tuple(range(100 * number + 1, 100 * number + 1 + prompt))
        item = an_item(tokens, **kw)
        return self.leases.reserve(a_key(number), item, US, now=now, wait_s=wait_s)

    def opened(self, number: int = 0, *, prompt: int = 7, now: float = 0.0) -> Lease:
        """A lease that prefill has opened."""
        lease, _ = self.reserve(number, prompt=prompt, now=now)
        assert self.leases.open(lease, US)
        return lease

    def join(self, lease: Lease) -> Sequence:
        """Join it; the sequence's blocks go back when the test ends."""
        sequence = self.leases.join(lease, 55)
        self._joined.append(sequence)
        return sequence

    def check(self) -> None:
        """Every count holds."""
        for sequence in self._joined:
            assert sequence.table is not None
            self.pool.release(sequence.table)
        self.leases.check_integrity()
        self.pool.check_integrity(self.leases.tables())


def refusal(lease: Lease, effects: list[Effect]) -> MeshError:
    """The one reason that the gateway and an early open of prefill are given."""
    refuse = effects[0]
    assert isinstance(refuse, Refuse)
    assert effects == [Refuse(lease, refuse.error), RefuseOpen(lease, refuse.error)]
    return refuse.error


@pytest.fixture
def desk() -> Any:
    """A desk whose counts are checked when the test ends."""
    desk = Desk()
    yield desk
    desk.check()


def test_room_is_granted_at_once(desk: Desk) -> None:
    """Prompt and growth, all of it."""
    lease, effects = desk.reserve(prompt=8, now=3.0)
    assert effects == [GrantLease(lease)]
    assert lease.state is LeaseState.GRANTED
    assert len(lease.block_table) == 3  # 8 tokens and one to grow
    assert (lease.skip_tokens, lease.wait_s) == (0, 0.0)


def test_growth_ends_with_the_answer(desk: Desk) -> None:
    """Nobody reserves room for tokens that will not come: the last one's KV is never computed."""
    desk.leases = Leases(desk.pool, LeasePolicy(growth_tokens=100))
    assert len(desk.reserve(1, prompt=8, max_tokens=1)[0].block_table) == 2
    assert len(desk.reserve(2, prompt=8, max_tokens=5)[0].block_table) == 3


def test_growth_is_no_reason_to_refuse(desk: Desk) -> None:
    """A prompt that fits is taken even if its whole answer would not."""
    desk.leases = Leases(desk.pool, LeasePolicy(growth_tokens=100))
    lease, effects = desk.reserve(prompt=30, max_tokens=100)
    assert effects == [GrantLease(lease)]
    assert len(lease.block_table) == 8


@pytest.mark.parametrize(("prompt", "max_tokens"), [(33, 1), (32, 2)])
def test_what_can_never_fit_is_refused_at_once(desk: Desk, prompt: int, max_tokens: int) -> None:
    """Waiting would not help."""
    lease, effects = desk.reserve(prompt=prompt, max_tokens=max_tokens)
    assert isinstance(refusal(lease, effects), NoCapacity)


def test_without_room_a_reservation_waits_and_holds_nothing(desk: Desk) -> None:
    """No hold-and-wait; the grant comes when the room does."""
    first, _ = desk.reserve(1, prompt=27)
    second, effects = desk.reserve(2, prompt=7)
    assert effects == []
    assert (second.state, len(second.block_table)) == (LeaseState.WAITING, 0)
    assert desk.leases.release(first, now=0.5) == [GrantLease(second)]
    assert second.wait_s == 0.5


def test_nobody_overtakes(desk: Desk) -> None:
    """A small reservation waits behind a large one that came before."""
    first, _ = desk.reserve(1, prompt=20)
    large, _ = desk.reserve(2, prompt=20)
    small, effects = desk.reserve(3, prompt=3)
    assert effects == []
    assert desk.leases.release(first, now=0.1) == [GrantLease(large), GrantLease(small)]


def test_a_reservation_that_may_not_wait_is_refused(desk: Desk) -> None:
    """wait_s = 0 asks for an answer now."""
    desk.reserve(1, prompt=27)
    lease, effects = desk.reserve(2, wait_s=0.0)
    assert isinstance(refusal(lease, effects), NoBlocks)
    assert lease.state is LeaseState.RELEASED


def test_waiting_ends(desk: Desk) -> None:
    """After wait_s the gateway hears that there is no room."""
    desk.reserve(1, prompt=27)
    lease, _ = desk.reserve(2, wait_s=2.0)
    assert desk.leases.next_tick_at == 2.0
    assert desk.leases.tick(now=1.9) == []
    assert isinstance(refusal(lease, desk.leases.tick(now=2.0)), NoBlocks)


def test_whoever_stops_waiting_makes_way(desk: Desk) -> None:
    """If the head of the queue gives up, the next may fit."""
    first, _ = desk.reserve(1, prompt=15)
    large, _ = desk.reserve(2, prompt=27, wait_s=1.0)
    small, _ = desk.reserve(3, prompt=7, wait_s=9.0)
    *refused, grant = desk.leases.tick(now=1.0)
    assert isinstance(refusal(large, refused), NoBlocks)
    assert grant == GrantLease(small)
    assert first.state is LeaseState.GRANTED


def test_the_queue_is_bounded() -> None:
    """Too many waiters are shed, not kept."""
    desk = Desk(max_waiting=1)
    desk.reserve(1, prompt=27)
    desk.reserve(2)
    lease, effects = desk.reserve(3)
    assert isinstance(refusal(lease, effects), Overloaded)


def test_the_number_of_leases_is_bounded() -> None:
    """Room or not, only so many receive at once."""
    desk = Desk(max_leases=1)
    first, _ = desk.reserve(1)
    second, effects = desk.reserve(2)
    assert effects == []
    assert desk.leases.release(first, now=0.0) == [GrantLease(second)]


def test_one_attempt_has_one_reservation(desk: Desk) -> None:
    """A gateway that reserves twice breaks the protocol; another attempt is another key."""
    lease, _ = desk.reserve(1)
    with pytest.raises(RemoteProtocolError):
        desk.reserve(1)
    item = an_item(3)
    _, effects = desk.leases.reserve(a_key(1, attempt=1), item, US, now=0.0, wait_s=1.0)
    assert isinstance(effects[0], GrantLease)
    assert lease.state is LeaseState.GRANTED


def test_a_cached_prefix_is_skipped(desk: Desk) -> None:
    """What this worker has is not sent again, even if that is the whole prompt."""
    lease = desk.opened(1, prompt=8)
    sequence = desk.join(lease)
    assert sequence.table is not None
    assert sequence.chain is not None
    desk.pool.publish(sequence.table, sequence.chain, sequence.tokens, 8)
    item = an_item(lease.item.token_ids)
    again, _ = desk.leases.reserve(a_key(2), item, US, now=0.0, wait_s=0.0)
    assert again.skip_tokens == 8
    assert again.block_table[:2] == sequence.block_table[:2]


def test_reservations_stand_back_for_those_who_run_here(desk: Desk) -> None:
    """Blocks that a preempted sequence waits for are not promised to newcomers."""
    desk.pool.claim(7)
    lease, effects = desk.reserve(prompt=7)
    assert effects == []
    desk.pool.claim(0)
    assert desk.leases.grant_waiting(now=0.2) == [GrantLease(lease)]


# --- the prefill worker --------------------------------------------------------------------------


def test_a_grant_is_opened_once(desk: Desk) -> None:
    """A second open would give two senders the same blocks."""
    lease = desk.opened()
    assert lease.state is LeaseState.OPEN
    with pytest.raises(RemoteProtocolError):
        desk.leases.open(lease, US)


def test_a_lease_without_blocks_is_not_opened(desk: Desk) -> None:
    """The open may be asked for again when the grant has come."""
    first, _ = desk.reserve(1, prompt=27)
    lease, _ = desk.reserve(2)
    assert not desk.leases.open(lease, US)
    assert lease.state is LeaseState.WAITING
    desk.leases.release(first, now=0.0)
    assert desk.leases.open(lease, US)


@pytest.mark.parametrize("blocker", [0, 27])
def test_only_the_named_prefill_may_open(desk: Desk, blocker: int) -> None:
    """With blocks or without, and without harm to the one who may."""
    if blocker:
        desk.reserve(1, prompt=blocker)
    lease, _ = desk.reserve(2)
    before = lease.state
    with pytest.raises(LeaseLost):
        desk.leases.open(lease, THEM)
    assert lease.state is before


def test_a_joined_lease_is_not_opened_again(desk: Desk) -> None:
    """Its blocks belong to a sequence."""
    lease = desk.opened()
    desk.join(lease)
    with pytest.raises(RemoteProtocolError):
        desk.leases.open(lease, US)


def test_a_lost_prefill_ends_its_leases_that_have_no_transfer(desk: Desk) -> None:
    """Granted or waiting for blocks: both sides hear it now, not when a timer ends; what is left
    goes to others."""
    opened = desk.opened(1, prompt=7)
    granted, _ = desk.reserve(2, prompt=20)
    waiting, _ = desk.reserve(3, prompt=20, wait_s=60.0)
    item = an_item(tuple(range(900, 920)))
    other, _ = desk.leases.reserve(a_key(4), item, THEM, now=0.0, wait_s=60.0)
    assert desk.leases.lose_source(US, GONE, now=1.0) == [
        Refuse(granted, GONE),
        RefuseOpen(granted, GONE),
        Refuse(waiting, GONE),
        RefuseOpen(waiting, GONE),
        GrantLease(other),
    ]
    assert opened.state is LeaseState.OPEN  # its transfer tells its end


# --- expiry -------------------------------------------------------------------------------------


def test_a_grant_that_nobody_opens_is_taken_back(desk: Desk) -> None:
    """By the clock, not by the next admission."""
    lease, _ = desk.reserve(now=1.0)
    assert desk.leases.next_tick_at == 6.0
    effect, to_prefill = desk.leases.tick(now=6.0)
    assert isinstance(effect, Refuse)
    assert isinstance(effect.error, LeaseLost)
    assert to_prefill == RefuseOpen(lease, effect.error)
    assert (lease.state, desk.pool.num_held) == (LeaseState.RELEASED, 0)


def test_an_open_lease_has_no_clock(desk: Desk) -> None:
    """Its transfer watches over frames, pair and peer."""
    desk.opened()
    assert desk.leases.next_tick_at is None
    assert desk.leases.tick(now=1e6) == []


# --- ending -------------------------------------------------------------------------------------


def test_leases_give_way_where_nothing_runs_for_want_of_room(desk: Desk) -> None:
    """Two seconds later, the newest first, and no more than are needed; what waits for KV goes by
    its transfer's end."""
    leases = desk.leases
    kept, newest = desk.opened(0), desk.opened(1)
    granted, _ = desk.reserve(2, now=1.0)
    desk.pool.claim(5)
    leases.rests(now=1.0)
    leases.steps()
    assert leases.next_tick_at == granted.expires_at
    leases.rests(now=2.0)
    leases.rests(now=3.0)
    assert leases.next_tick_at == 4.0
    assert leases.tick(now=3.9) == []
    effects = leases.tick(now=4.0)
    assert [(type(it), it.lease) for it in effects] == [(Refuse, granted), (Refuse, newest)]
    for lease in (granted, newest):
        leases.cancel(lease, GONE, now=4.0)
    leases.settled(newest, now=4.0)
    leases.rests(now=4.0)  # there is room now
    assert leases.next_tick_at is None
    leases.release(kept, now=4.0)


def test_computed_prompts_give_way_to_a_reservation_where_nothing_runs(desk: Desk) -> None:
    """Two seconds after it began to wait, with as many tokens as its blocks lack; a step that runs
    meanwhile is a reason to wait."""
    prompts = desk.pool.acquire(desk.pool.new_chain(), range(24), 24, max_hit_tokens=0)
    assert prompts is not None
    desk.leases.rests(now=0.0)
    assert desk.leases.next_tick_at is None
    lease, effects = desk.reserve(prompt=11, now=1.0, wait_s=9.0)
    assert (effects, desk.leases.next_tick_at) == ([], 3.0)
    desk.leases.steps()
    assert desk.leases.next_tick_at == 10.0
    desk.leases.rests(now=4.0)
    (effect,) = desk.leases.tick(now=6.0)
    assert isinstance(effect, MakeRoom)
    assert effect.num_tokens == 4
    desk.pool.release(prompts)
    assert desk.leases.grant_waiting(now=6.0) == [GrantLease(lease)]


def test_nobody_gives_way_to_a_prefix(desk: Desk) -> None:
    """It may be computed as well, and takes no room that a waiting prompt yields to answers."""
    desk.pool.claim(7, 7)
    prefix, effects = desk.reserve(1, max_tokens=1, wait_s=9.0)
    assert effects == []
    desk.leases.rests(now=0.0)
    assert desk.leases.next_tick_at == prefix.give_up_at
    desk.leases.cancel(prefix, GONE, now=0.0)
    answer, effects = desk.reserve(2)
    assert effects == [GrantLease(answer)]


def test_joining_hands_the_blocks_over(desk: Desk) -> None:
    """The sequence owns them, knows its first token, and needs one decode row."""
    lease = desk.opened(prompt=7)
    blocks = list(lease.block_table)
    sequence = desk.join(lease)
    assert list(sequence.block_table) == blocks
    assert sequence.tokens[-1] == 55
    assert sequence.is_decoding
    assert (lease.state, len(lease.block_table)) == (LeaseState.JOINED, 0)
    assert desk.leases.release(lease, now=0.0) == []


def test_a_sequence_is_expected_from_the_grant_until_it_joins(desk: Desk) -> None:
    """Granted or open; one that waits for blocks gets them from somebody first."""
    assert not desk.leases.is_expecting
    lease, _ = desk.reserve(1, prompt=27)
    assert desk.leases.is_expecting
    desk.leases.open(lease, US)
    assert desk.leases.is_expecting
    waiter, _ = desk.reserve(2)
    desk.join(lease)
    assert waiter.state is LeaseState.WAITING
    assert not desk.leases.is_expecting


def test_no_sequence_is_expected_of_a_lease_that_ends(desk: Desk) -> None:
    """Its blocks may still be held, as its receive is not settled."""
    lease = desk.opened()
    desk.leases.cancel(lease, GONE, now=0.0)
    assert not desk.leases.is_expecting
    desk.leases.begin_quarantine(lease)
    assert not desk.leases.is_expecting


def test_cancelling_a_waiter_lets_the_next_in(desk: Desk) -> None:
    """It held nothing, but it stood in the way."""
    desk.reserve(1, prompt=15)
    large, _ = desk.reserve(2, prompt=27)
    small, _ = desk.reserve(3, prompt=7)
    effects = desk.leases.cancel(large, GONE, now=0.0)
    assert effects == [RefuseOpen(large, GONE), GrantLease(small)]


def test_cancelling_a_grant_frees_it(desk: Desk) -> None:
    """Nobody writes there yet; prefill's open may be on its way, and is refused then."""
    lease, _ = desk.reserve()
    assert desk.leases.cancel(lease, GONE, now=0.0) == [RefuseOpen(lease, GONE)]
    assert desk.pool.num_held == 0
    assert desk.leases.cancel(lease, GONE, now=0.0) == []


def test_cancelling_an_open_lease_aborts_its_receive(desk: Desk) -> None:
    """Its blocks are given to nobody before the quarantine ends."""
    lease = desk.opened(prompt=27)
    assert desk.leases.cancel(lease, GONE, now=0.0) == [AbortReceive(lease, GONE)]
    assert desk.leases.cancel(lease, GONE, now=0.0) == []
    desk.leases.begin_quarantine(lease)
    waiter, effects = desk.reserve(2)
    assert effects == []
    assert desk.leases.statistics().num_quarantined_blocks == 7
    with pytest.raises(LocalProtocolError):
        desk.leases.release(lease, now=0.0)
    assert desk.leases.settled(lease, now=0.5) == [GrantLease(waiter)]
    assert lease.state is LeaseState.RELEASED


def test_an_abort_with_nothing_in_flight_needs_no_quarantine(desk: Desk) -> None:
    """If no receive was posted the blocks are free at once."""
    lease = desk.opened()
    desk.leases.cancel(lease, GONE, now=0.0)
    assert desk.leases.release(lease, now=0.0) == []
    assert desk.pool.num_held == 0


def test_a_quarantined_block_may_be_cached_by_nobody(desk: Desk) -> None:
    """Half-received KV is never published."""
    lease = desk.opened(prompt=8)
    desk.leases.cancel(lease, GONE, now=0.0)
    desk.leases.release(lease, now=0.0)
    assert desk.pool.statistics().num_cached == 0


@pytest.mark.parametrize("move", ["join", "begin_quarantine"])
def test_moves_out_of_order_are_our_bugs(desk: Desk, move: str) -> None:
    """A lease that is not open has no receive to end."""
    lease, _ = desk.reserve()
    with pytest.raises(LocalProtocolError):
        {
            "join": lambda: desk.leases.join(lease, 1),
            "begin_quarantine": lambda: desk.leases.begin_quarantine(lease),
        }[move]()


def test_what_is_quarantined_is_no_more_than_what_is_held(desk: Desk) -> None:
    """Leases that share a cached beginning are quarantined together: a worker reports what is held
    less what is quarantined, and a number below 0 would end its sessions."""
    lease = desk.opened(1, prompt=8)
    sequence = desk.join(lease)
    assert sequence.table is not None
    assert sequence.chain is not None
    desk.pool.publish(sequence.table, sequence.chain, sequence.tokens, 8)
    for number in (2, 3, 4):
        item = an_item((*lease.item.token_ids, number))
        alike, _ = desk.leases.reserve(a_key(number), item, US, now=0.0, wait_s=0.0)
        assert desk.leases.open(alike, US)
        desk.leases.cancel(alike, GONE, now=0.0)
        desk.leases.begin_quarantine(alike)
    assert desk.leases.statistics().num_quarantined_blocks == 3
    assert desk.pool.num_held == 6


def test_the_ledger_adds_up(desk: Desk) -> None:
    """reserved = freed + joined + live + quarantined, in blocks."""
    joined, aborted = desk.opened(1, prompt=3), desk.opened(2, prompt=3)
    desk.reserve(3, prompt=3)
    desk.join(joined)
    desk.leases.cancel(aborted, GONE, now=0.0)
    stats = desk.leases.statistics()
    assert stats.num_reserved_blocks == 3
    assert (stats.num_joined_blocks, stats.num_live_blocks) == (1, 1)
    assert (stats.num_quarantined_blocks, stats.num_freed_blocks) == (1, 0)
