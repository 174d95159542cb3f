"""The dispatcher by itself: whom it looks for, how long, and what it says when nobody comes."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.core.dispatcher import (
    LEAST_WAIT_S,
    BlamePair,
    Dispatcher,
    Effect,
    LookForPair,
    Send,
    WorkerDrains,
)
from services.gateway.core.lifecycle import CancelLeg, End, Leg, Lifecycle, Reroute
from services.gateway.core.routing.expectations import Prediction
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.core.routing.sides import RouteRequest
from shared.errors import (
    DeadlinePassed,
    MeshError,
    NoBlocks,
    Overloaded,
    PeerError,
    ShuttingDown,
    WorkerLost,
)
from shared.ids import Incarnation
from shared.request import AnswerToken, SamplingParams
from shared.transfer.effects import MAX_RESERVE_WAIT_S
from tests.support.routing import a_decision

P, D, OTHER = Incarnation(1), Incarnation(2), Incarnation(3)
PAIR = a_decision(P, D)
PAIR_WAIT_S, FAILOVER_WAIT_S = 10.0, 4.0


class Room:
    """A request of three tokens, its life and its dispatcher."""

    def __init__(
        self,
        *,
        max_tokens: int = 8,
        deadline_at: float | None = None,
        may_be_refused: bool = True,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.life = Lifecycle((1, 2, 3), sampling, max_attempts=3)
        self.dispatcher = Dispatcher(
            self.life,
            deadline_at=deadline_at,
            pair_wait_s=PAIR_WAIT_S,
            failover_wait_s=FAILOVER_WAIT_S,
            may_be_refused=may_be_refused,
        )

    def sent(self, decision: RouteDecision = PAIR, now: float = 0.0) -> Send:
        """Find this pair."""
        (send,) = self.dispatcher.pair_found(decision, now)
        assert isinstance(send, Send)
        return send

    def fail(
        self, leg: Leg, error: MeshError, *, now: float = 0.0, silence_s: float = 0.0, lost: bool
    ) -> list[Effect]:
        """Fail a leg of the attempt that runs, and have the next one looked for."""
        attempt = self.life.num_attempts - 1
        *_, reroute = self.life.leg_failed(attempt, leg, error, lost=lost)
        assert isinstance(reroute, Reroute)
        return self.dispatcher.attempt_failed(reroute, silence_s=silence_s, now=now)


def running(*, max_tokens: int = 8) -> Room:
    """One whose first attempt was sent at once."""
    room = Room(max_tokens=max_tokens)
    room.dispatcher.begin(0.0)
    room.sent()
    return room


def looked(effects: list[Effect]) -> LookForPair:
    """The only effect."""
    (search,) = effects
    assert isinstance(search, LookForPair)
    return search


def error_of(effects: list[Effect]) -> MeshError:
    """What ended the request, with nothing left to cancel."""
    (end,) = effects
    assert isinstance(end, End)
    assert end.error is not None
    return end.error


def test_a_pair_is_looked_for_at_once_and_gets_both_legs() -> None:
    """With all that a search must know, and what is left of the wait for room."""
    room = Room(deadline_at=20.0)
    assert looked(room.dispatcher.begin(1.0)) == LookForPair(
        RouteRequest(num_tokens=3, max_new_tokens=8), until=11.0
    )
    send = room.sent(now=4.0)
    assert send.legs == {Leg.PREFILL: P, Leg.DECODE: D}
    assert (send.attempt, send.token_ids, send.after) == (0, (1, 2, 3), None)
    assert (send.wait_s, send.deadline_s) == (7.0, 16.0)


@pytest.mark.parametrize(
    ("decision", "max_tokens", "legs"),
    [
        (PAIR, 1, {Leg.PREFILL: P}),
        (a_decision(D, D), 8, {Leg.WHOLE: D}),
        (a_decision(D, D), 1, {Leg.WHOLE: D}),
    ],
)
def test_one_leg_where_one_is_enough(
    decision: RouteDecision, max_tokens: int, legs: dict[Leg, Incarnation]
) -> None:
    """A last token needs no decode worker, a colocated worker no other."""
    room = Room(max_tokens=max_tokens)
    room.dispatcher.begin(0.0)
    assert room.sent(decision).legs == legs


def test_who_failed_is_avoided_and_the_silence_counts() -> None:
    """The client has waited through it already; what it has is not computed for it again."""
    room = running()
    room.life.granted(0)
    room.life.token_arrived(0, Leg.PREFILL, AnswerToken(0, 7))
    search = looked(room.fail(Leg.DECODE, WorkerLost("gone"), now=5.0, silence_s=1.0, lost=True))
    assert search.request == RouteRequest(num_tokens=4, max_new_tokens=7, avoid=frozenset({D}))
    assert search.until == 5.0 + FAILOVER_WAIT_S - 1.0
    send = room.sent(a_decision(P, OTHER), now=6.0)
    assert send.token_ids == (1, 2, 3, 7)
    assert send.wait_s == MAX_RESERVE_WAIT_S  # for room: the client has a token
    assert isinstance(send.after, WorkerLost)
    search = looked(room.fail(Leg.DECODE, WorkerLost("gone"), now=9.0, silence_s=60.0, lost=True))
    assert search.request.avoid == {D, OTHER}
    assert search.until == 9.0


def test_a_long_prompt_may_wait_for_room_while_it_is_computed() -> None:
    """Before that it needs none: others, as long, may hold it until then."""
    room = Room()
    room.dispatcher.begin(0.0)
    takes_325_s = Prediction(queue_s=12.0, own_s=3.0, prefill_s=309.0, handover_s=1.0)
    send = room.sent(PAIR._replace(prediction=takes_325_s), now=4.0)
    assert send.wait_s == PAIR_WAIT_S - 4.0 + 325.0


def test_a_pair_is_blamed_when_one_says_that_the_other_failed_it() -> None:
    """Both are avoided: who is to blame cannot be known."""
    room = running()
    blame, search = room.fail(Leg.PREFILL, PeerError("decode is silent"), lost=False)
    assert blame == BlamePair(P, D)
    assert isinstance(search, LookForPair)
    assert search.request.avoid == {P, D}


def test_who_refuses_because_it_drains_gets_nothing_more() -> None:
    """Its report is on its way; until it comes every attempt would be refused."""
    room = running()
    drains, search = room.fail(Leg.PREFILL, ShuttingDown("it is draining"), lost=False)
    assert drains == WorkerDrains(P)
    assert isinstance(search, LookForPair)
    assert search.request.avoid == {P}


def test_nobody_is_blamed_for_an_attempt_with_one_leg() -> None:
    """There was no pair."""
    room = running(max_tokens=1)
    search = looked(room.fail(Leg.PREFILL, PeerError("whoever"), lost=False))
    assert search.request.avoid == {P}


def test_room_is_waited_for_once_however_many_are_asked() -> None:
    """The first wait goes on; with next to nothing left of it the client hears that there is no
    room."""
    room = running()
    search = looked(room.fail(Leg.DECODE, NoBlocks("full"), now=6.0, lost=False))
    assert search.until == PAIR_WAIT_S
    assert room.sent(now=7.0).wait_s == 3.0
    late = PAIR_WAIT_S - LEAST_WAIT_S / 2
    error = error_of(room.fail(Leg.DECODE, NoBlocks("full"), now=late, lost=False))
    assert isinstance(error, Overloaded)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_answer_that_has_begun_is_not_refused_for_want_of_room(has_tokens: bool) -> None:
    """Its own tokens or those of another answer to the request are with the client: it waits on."""
    room = Room(may_be_refused=has_tokens)
    assert looked(room.dispatcher.begin(0.0)).until == PAIR_WAIT_S
    room.sent()
    now = 1.0
    if has_tokens:
        room.life.granted(0)
        room.life.token_arrived(0, Leg.PREFILL, AnswerToken(0, 7))
        room.fail(Leg.DECODE, WorkerLost("it died"), now=now, lost=True)
        room.sent(now=now)
    now += 10 * PAIR_WAIT_S
    search = looked(room.fail(Leg.DECODE, NoBlocks("full"), now=now, lost=False))
    assert search.until == now + PAIR_WAIT_S
    assert room.sent(now=now).wait_s == MAX_RESERVE_WAIT_S


@pytest.mark.parametrize(
    ("deadline_at", "why", "expected"),
    [
        (None, "no decode worker has joined", "no decode worker has joined"),
        (None, "", "none is large enough"),
        (10.5, "", "none is large enough"),
        (5.0, "", "the deadline passed while no worker was free"),
    ],
)
def test_nobody_came(deadline_at: float | None, why: str, expected: str) -> None:
    """The search ends at the deadline if that comes first, and says what was missing if not."""
    room = Room(deadline_at=deadline_at)
    search = looked(room.dispatcher.begin(0.0))
    assert search.until == min(PAIR_WAIT_S, deadline_at or PAIR_WAIT_S)
    error = error_of(room.dispatcher.wait_over(why))
    assert expected in error.message
    assert isinstance(error, DeadlinePassed if deadline_at == 5.0 else WorkerLost)


def test_nobody_for_another_attempt_says_why_the_last_one_failed() -> None:
    """That no pair came is only what followed."""
    room = running()
    looked(room.fail(Leg.DECODE, WorkerLost("its host burnt"), lost=True))
    assert error_of(room.dispatcher.wait_over("")).message == "its host burnt"


def end_of(room: Room, event: str) -> list[Any]:
    """What follows a deadline, or a drain's limit."""
    if event == "deadline":
        return room.dispatcher.deadline_passed()
    return room.dispatcher.give_up(ShuttingDown("limit"))


@pytest.mark.parametrize("event", ["deadline", "drain"])
def test_an_end_stops_the_search_and_the_legs(event: str) -> None:
    """Whichever there is; and what comes later changes nothing."""
    searching, running = Room(deadline_at=5.0), Room(deadline_at=5.0)
    for room in (searching, running):
        room.dispatcher.begin(0.0)
    running.sent()
    error_of(end_of(searching, event))
    assert searching.dispatcher.pair_found(PAIR, 5.0) == []
    assert searching.dispatcher.wait_over("") == []
    assert searching.dispatcher.deadline_passed() == []
    *cancelled, end = end_of(running, event)
    assert cancelled == [CancelLeg(Leg.PREFILL), CancelLeg(Leg.DECODE)]
    assert isinstance(end, End)
    assert end_of(running, event) == []
