"""Which pairs a worker makes, answers, keeps and lets go; and two workers that dial each other at
once: whatever crosses whatever, one pair survives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.errors import LocalProtocolError, RemoteProtocolError, WorkerLost
from shared.ids import Incarnation, MeshPeer
from shared.worker.core.pairs import (
    REDIAL_S,
    WANTED_S,
    Dial,
    Effect,
    LetGo,
    Pairs,
    PairState,
    StopDial,
)

OWN = Incarnation(10)


def a_peer(number: int) -> MeshPeer:
    return MeshPeer(Incarnation(number), Address(f"host-{number}", 1))


LOWER, HIGHER = a_peer(5), a_peer(15)


def ready_with(*peers: MeshPeer, max_warm: int = 2) -> Pairs:
    """Pairs that were asked for one after the other."""
    pairs = Pairs(OWN, max_warm=max_warm)
    for peer in peers:
        assert pairs.asked(peer, 0.0) == [Dial(peer)]
        assert pairs.made(peer.incarnation, ()) == []
    return pairs


def test_standing_partners_are_dialled_at_once_and_again_when_lost() -> None:
    """With pauses that grow, and are short again after a success."""
    pairs, now = Pairs(OWN, max_warm=2), 0.0
    assert pairs.listed([LOWER, HIGHER], now) == [Dial(LOWER), Dial(HIGHER)]
    assert pairs.listed([LOWER, HIGHER], now) == []
    pairs.made(HIGHER.incarnation, ())
    for pause_s in (*REDIAL_S, REDIAL_S[-1]):
        assert pairs.ended(LOWER.incarnation, now) == []
        assert pairs.next_tick_at == now + pause_s
        assert pairs.tick(now) == []
        now += pause_s
        assert pairs.tick(now) == [Dial(LOWER)]
        assert pairs.next_tick_at is None
    pairs.made(LOWER.incarnation, ())
    pairs.ended(LOWER.incarnation, now)
    assert pairs.next_tick_at == now + REDIAL_S[0]


def test_a_partner_that_is_listed_no_more_is_kept_but_not_dialled_again() -> None:
    """A gateway that restarts lists nobody for a while: that closes nothing."""
    pairs = Pairs(OWN, max_warm=2)
    pairs.listed([LOWER], 0.0)
    pairs.made(LOWER.incarnation, ())
    assert pairs.listed([], 1.0) == []
    assert pairs.state_of(LOWER.incarnation) is PairState.READY
    assert pairs.ended(LOWER.incarnation, 2.0) == []
    assert pairs.state_of(LOWER.incarnation) is PairState.APART
    assert pairs.next_tick_at is None


def test_what_is_asked_for_is_tried_for_a_while() -> None:
    """Then it takes another word of a gateway; while it waits, more words change nothing."""
    pairs = Pairs(OWN, max_warm=2)
    assert pairs.asked(LOWER, 0.0) == [Dial(LOWER)]
    assert pairs.asked(LOWER, 0.0) == []
    pairs.ended(LOWER.incarnation, 1.0)
    assert pairs.asked(LOWER, 1.0) == []
    assert pairs.tick(1.1) == [Dial(LOWER)]
    pairs.ended(LOWER.incarnation, 1.0 + WANTED_S)
    assert pairs.state_of(LOWER.incarnation) is PairState.APART
    assert pairs.asked(LOWER, 100.0) == [Dial(LOWER)]


def test_who_is_wanted_no_more_when_the_pause_is_over_is_forgotten() -> None:
    """Its list has changed meanwhile."""
    pairs = Pairs(OWN, max_warm=2)
    pairs.listed([LOWER], 0.0)
    pairs.ended(LOWER.incarnation, 0.0)
    pairs.listed([], 0.0)
    assert pairs.tick(1.0) == []
    assert pairs.state_of(LOWER.incarnation) is PairState.APART


@pytest.mark.parametrize("peer", [LOWER, HIGHER])
def test_who_has_a_pair_or_is_making_it_answers_no_other_call(peer: MeshPeer) -> None:
    """Of calls that do not cross the first one counts, whoever made it."""
    pairs = Pairs(OWN, max_warm=2)
    assert pairs.dialled(peer.incarnation) == []
    for _ in range(2):
        with pytest.raises(WorkerLost) as refused:
            pairs.dialled(peer.incarnation)
        assert refused.value.code == "crossed"
        if pairs.state_of(peer.incarnation) is PairState.ANSWERING:
            pairs.made(peer.incarnation, ())
    assert pairs.asked(peer, 0.0) == []


def test_of_two_calls_that_cross_that_of_the_smaller_incarnation_counts() -> None:
    """We take theirs and break ours off, or refuse theirs."""
    pairs = Pairs(OWN, max_warm=2)
    pairs.listed([LOWER, HIGHER], 0.0)
    assert pairs.dialled(LOWER.incarnation) == [StopDial(LOWER.incarnation)]
    assert pairs.state_of(LOWER.incarnation) is PairState.ANSWERING
    with pytest.raises(WorkerLost):
        pairs.dialled(HIGHER.incarnation)
    assert pairs.state_of(HIGHER.incarnation) is PairState.DIALLING


def test_a_call_may_come_in_a_pause() -> None:
    """It counts, and we dial no more."""
    pairs = Pairs(OWN, max_warm=2)
    pairs.listed([HIGHER], 0.0)
    pairs.ended(HIGHER.incarnation, 0.0)
    assert pairs.dialled(HIGHER.incarnation) == []
    assert pairs.next_tick_at is None


def test_nobody_is_a_partner_of_its_own() -> None:
    """A stranger that says so is refused."""
    with pytest.raises(RemoteProtocolError):
        Pairs(OWN, max_warm=2).dialled(OWN)


def test_of_warm_pairs_the_one_used_longest_ago_goes() -> None:
    """As many as are too many; it is not made again by itself."""
    first, second, third = (a_peer(number).incarnation for number in (1, 2, 3))
    pairs = ready_with(a_peer(1), a_peer(2))
    pairs.asked(a_peer(3), 1.0)
    assert pairs.made(third, [second, first, third]) == [LetGo(second)]
    pairs.ended(second, 1.0)
    assert pairs.state_of(second) is PairState.APART
    assert pairs.next_tick_at is None


def test_pairs_in_use_standing_ones_and_those_that_others_dialled_stay() -> None:
    """None of them is let go, however many there are."""
    used, standing, theirs = a_peer(1), a_peer(2), a_peer(3)
    pairs = ready_with(used, standing, max_warm=1)
    pairs.listed([standing], 0.0)
    pairs.dialled(theirs.incarnation)
    assert pairs.made(theirs.incarnation, [standing.incarnation]) == []
    pairs.asked(a_peer(4), 0.0)
    idle = [standing.incarnation, theirs.incarnation, a_peer(4).incarnation]
    assert pairs.made(a_peer(4).incarnation, idle) == []
    pairs.asked(a_peer(5), 0.0)
    assert pairs.made(a_peer(5).incarnation, [used.incarnation, *idle]) == [
        LetGo(used.incarnation),
        LetGo(a_peer(4).incarnation),
    ]


def test_what_cannot_be_is_our_bug() -> None:
    """The table has no such move."""
    pairs = ready_with(LOWER)
    with pytest.raises(LocalProtocolError):
        pairs.made(LOWER.incarnation, ())


# --- two ends -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One dial: what is under way of it comes in order, and it ends at both ends."""

    caller: End
    callee: End
    wire: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])

    def later(self, act: Callable[[], None]) -> None:
        """It arrives at the other end some time."""
        self.wire.append(act)


@dataclass(eq=False)
class End:
    """One of two workers: its core, the call that it makes or answers, and the pair it has."""

    me: MeshPeer
    core: Pairs
    calls: list[Call]
    other: End = field(init=False)
    call: Call | None = None
    pair: Call | None = None
    now: float = 0.0

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Dial():
                    call = self.call = Call(self, self.other)
                    self.calls.append(call)
                    call.later(lambda call=call: call.callee.hear(call))
                case StopDial():
                    self.leave(self.call)
                    self.call = None
                case LetGo():
                    raise AssertionError("nobody is let go here")

    def hear(self, call: Call) -> None:
        """The hello of a call, though its caller may have broken it off since."""
        try:
            effects = self.core.dialled(self.other.me.incarnation)
        except WorkerLost:
            self.leave(call)
            return
        self.do(effects)
        self.call = call
        call.later(lambda: self.other.complete(call))
        call.later(lambda: self.complete(call))

    def complete(self, call: Call) -> None:
        """The handshake is through as this end sees it."""
        if self.call is call:
            assert self.pair is None, "a second pair between two workers"
            self.call, self.pair = None, call
            assert self.core.made(self.other.me.incarnation, ()) == []

    def leave(self, call: Call | None) -> None:
        """This end has done with a call: the other one sees it some time."""
        assert call is not None
        call.later(lambda: self.other.left(call))

    def left(self, call: Call) -> None:
        """The other end has."""
        if self.call is call or self.pair is call:
            self.call = self.pair = None
            self.core.ended(self.other.me.incarnation, self.now)

    def lose(self) -> None:
        """This end's pair breaks."""
        if self.pair is not None:
            self.leave(self.pair)
            self.left(self.pair)

    def want(self, *, is_standing: bool) -> None:
        """A gateway's word."""
        want = self.core.listed([self.other.me], self.now) if is_standing else None
        self.do(self.core.asked(self.other.me, self.now) if want is None else want)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.core.tick(self.now))


@given(st.integers(0, 2**32), st.booleans())
def test_whatever_crosses_one_pair_is_left(seed: int, is_standing: bool) -> None:
    """Both want it, calls overtake each other, and the pair breaks now and then, seen by one end
    long before the other: there is never a second one, and in the end both have the same one."""
    source, calls = random.Random(seed), list[Call]()
    ends = [End(peer, Pairs(peer.incarnation, max_warm=4), calls) for peer in (LOWER, HIGHER)]
    ends[0].other, ends[1].other = ends[1], ends[0]

    def let_something_arrive() -> None:
        under_way = [call for call in calls if call.wire]
        if under_way:
            source.choice(under_way).wire.popleft()()

    for _ in range(30):
        end = source.choice(ends)
        match source.choice(["want", "lose", "wait"]):
            case "want":
                end.want(is_standing=is_standing)
            case "lose":
                end.lose()
            case _:
                end.wait(1.0)
        for _ in range(source.randrange(6)):
            let_something_arrive()
    for _ in range(30):
        for end in ends:
            end.want(is_standing=is_standing)
            end.wait(1.0)
        while any(call.wire for call in calls):
            let_something_arrive()
    assert ends[0].pair is not None
    assert ends[0].pair is ends[1].pair
