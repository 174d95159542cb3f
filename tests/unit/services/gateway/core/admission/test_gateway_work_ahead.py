"""What workers have ahead: prompts, answers and room; the rest waits in the gateway, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.gateway.core.admission.admission import (
    AGEING_S,
    Admission,
    Admit,
    Effect,
    TurnAway,
)
from services.gateway.core.admission.overload import ChosenPair, Overload, OverloadMode
from services.gateway.core.admission.work_ahead import PROMPTS_AHEAD
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.errors import DeadlinePassed
from shared.ids import StreamId
from tests.unit.services.gateway.core.admission.test_gateway_admission import of, refused
from tests.unit.services.gateway.core.routing.test_gateway_routing import a_worker

PREFILL, DECODE = a_worker(Role.PREFILL, 1), a_worker(Role.DECODE, 2)


def an_admission(
    *,
    decode: Worker = DECODE,
    pending: int = 1000,
    sides: Callable[[], Sides] | None = None,
) -> Admission:
    """One pair, or those of ``sides``; eight places, two that wait besides, two seconds."""
    pair = Sides([PREFILL], [1], [decode])
    return Admission(
        max_running=8,
        max_waiting=2,
        max_wait_s=2.0,
        overload=Overload(OverloadMode.OFF),
        sides=sides or (lambda: pair),
        why_not_ready=lambda: "all are silent",
        max_pending_tokens=pending,
    )


def key(number: int) -> bytes:
    return b"%d" % number


def filled(admission: Admission, *, num_tokens: int = 300) -> None:
    """As many prompts as the worker has ahead, and not one more."""
    for number in range(PROMPTS_AHEAD):
        assert admission.arrive(key(number), 0.0, num_tokens=num_tokens) == [Admit(key(number))]
        assert admission.pair_found(key(number), ChosenPair(PREFILL, DECODE), 0.0) == []
        assert admission.granted(key(number), 0.0) == []


def begin(admission: Admission, number: int, now: float = 1.0) -> list[object]:
    """Its first token."""
    return list(admission.emitted(key(number), 1, now, cached_tokens=0))


def test_more_prompts_wait_and_the_urgent_one_is_next() -> None:
    """A first token lets the next one go; later tokens do not."""
    admission = an_admission()
    filled(admission)
    assert admission.arrive(b"usual", 0.0, num_tokens=300) == []
    assert admission.arrive(b"urgent", 0.1, terms=of("", 7), num_tokens=300) == []
    assert begin(admission, 0) == [Admit(b"urgent")]
    assert begin(admission, 0) == []
    assert begin(admission, 1) == [Admit(b"usual")]
    assert admission.statistics().num_running == PROMPTS_AHEAD + 2


def test_a_prompt_that_ends_without_a_token_counts_no_more() -> None:
    admission = an_admission()
    filled(admission)
    assert admission.arrive(b"next", 0.0, num_tokens=300) == []
    assert admission.leave(key(2), 0.1) == [Admit(b"next")]


def test_few_prompts_are_never_too_many_however_long() -> None:
    filled(an_admission(), num_tokens=100_000)


def test_short_prompts_and_those_that_are_cached_are_not_held() -> None:
    """It is tokens to compute that count."""
    admission = an_admission()
    for number in range(7):
        assert admission.arrive(key(number), 0.0, num_tokens=300) == [Admit(key(number))]
        admission.pair_found(key(number), ChosenPair(PREFILL, DECODE, 290), 0.0)
        admission.granted(key(number), 0.0)


def test_with_nothing_set_all_is_sent_at_once() -> None:
    admission = an_admission(pending=0)
    filled(admission, num_tokens=10_000)
    assert admission.arrive(b"next", 0.0, num_tokens=10_000) == [Admit(b"next")]


def test_who_waits_for_workers_alone_is_not_refused_for_it() -> None:
    """But its deadline passes; and when all places are taken, the wait for one is bounded."""
    admission = an_admission()
    filled(admission)
    admission.arrive(b"patient", 0.0, num_tokens=300)
    admission.arrive(b"hasty", 0.0, num_tokens=300, deadline_at=5.0)
    assert admission.tick(2.0) == []
    assert admission.next_tick_at == 4.0
    assert admission.tick(4.0) == []
    (late,) = admission.tick(5.0)
    assert isinstance(late, TurnAway)
    assert late.key == b"hasty"
    assert isinstance(late.error, DeadlinePassed)
    for number in range(PROMPTS_AHEAD):
        begin(admission, number, 5.0)
    for number in range(10, 13):
        assert admission.arrive(key(number), 6.0, num_tokens=300) == [Admit(key(number))]
    assert admission.arrive(b"last", 6.0, num_tokens=300) == []
    assert refused(list(admission.tick(8.0))) == (b"last", "queue_timeout")


def test_as_many_wait_as_there_are_places_and_no_more() -> None:
    """Eight places and two that wait are ten requests, held or not."""
    admission = an_admission()
    filled(admission)
    for number in range(10, 16):
        assert admission.arrive(key(number), 0.0, num_tokens=300) == []
    assert refused(admission.arrive(b"eleventh", 0.0)) == (b"eleventh", "queue_full")


def test_a_decode_worker_is_given_no_more_answers_than_it_runs_at_once() -> None:
    """As soon as it has told how many those are."""
    decode = a_worker(Role.DECODE, 2)
    admission = an_admission(decode=decode)
    for number in range(2):
        admission.arrive(key(number), 0.0, num_tokens=10)
        begin(admission, number)
    decode.report(WorkerStatus(max_running=2))
    assert admission.changed(1.0, decode) == []
    assert admission.arrive(b"next", 1.0, num_tokens=10) == []
    assert admission.leave(key(0), 2.0) == [Admit(b"next")]


@pytest.mark.parametrize("is_apart", [True, False])
def test_where_no_decode_worker_has_room_few_wait_for_it(is_apart: bool) -> None:
    """Their prompts are computed and stay on prefill: those of the others would fill it. Where
    nothing moves, prompts wait for room by themselves."""
    decode = a_worker(Role.DECODE, 2)
    decode.report(WorkerStatus(reserved_blocks=decode.num_blocks))
    admission = an_admission(decode=decode)
    for number in range(2):
        assert admission.arrive(key(number), 0.0, num_tokens=10) == [Admit(key(number))]
        pair = ChosenPair(PREFILL if is_apart else decode, decode)
        admission.pair_found(key(number), pair, 0.0)
        begin(admission, number)
    assert admission.arrive(b"next", 1.0, num_tokens=10) == ([] if is_apart else [Admit(b"next")])
    if is_apart:
        assert admission.granted(key(0), 2.0) == [Admit(b"next")]
        assert admission.granted(b"unknown", 2.0) == ()


def test_a_wait_for_workers_ages_slowly() -> None:
    """Seconds of waiting are usual there, and must not make everybody urgent."""
    admission = an_admission()
    filled(admission)
    admission.arrive(b"old", 0.0, num_tokens=300)
    admission.arrive(b"urgent", 50.0, terms=of("", 4), num_tokens=300)
    assert begin(admission, 0, 51.0) == [Admit(b"urgent")]
    admission.arrive(b"urgent too", AGEING_S + 1, terms=of("", 4), num_tokens=300)
    assert begin(admission, 1, AGEING_S + 2) == [Admit(b"old")]


# --- workers that come, go and tell ---------------------------------------------------------------


def test_a_worker_that_joins_is_given_work_at_once() -> None:
    """Whatever those have that were here before it."""
    sides = [Sides([PREFILL], [1], [DECODE])]
    admission = an_admission(sides=lambda: sides[-1])
    filled(admission)
    assert admission.arrive(b"next", 0.0, num_tokens=300) == []
    assert admission.changed(0.1) == []
    sides.append(Sides([PREFILL, a_worker(Role.PREFILL, 3)], [1, 1], [DECODE]))
    assert admission.changed(0.2) == [Admit(b"next")]


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_a_worker_that_drains_still_has_keeps_no_other_idle(has_begun: bool) -> None:
    """Its answers may take minutes, and its prompts seconds: who comes goes to those that are left.
    When it can be asked again they count again."""
    old_prefill, new_prefill = a_worker(Role.PREFILL, 1), a_worker(Role.PREFILL, 3)
    old_decode, new_decode = a_worker(Role.DECODE, 2), a_worker(Role.DECODE, 4)
    for decode in (old_decode, new_decode):
        decode.report(WorkerStatus(max_running=PROMPTS_AHEAD))
    old = Sides([old_prefill], [1], [old_decode])
    sides = [old]
    admission = an_admission(sides=lambda: sides[-1])
    for number in range(PROMPTS_AHEAD):
        assert admission.arrive(key(number), 0.0, num_tokens=300) == [Admit(key(number))]
        admission.pair_found(key(number), ChosenPair(old_prefill, old_decode), 0.0)
        admission.granted(key(number), 0.0)
        if has_begun:
            begin(admission, number)
    assert admission.arrive(b"next", 2.0, num_tokens=300) == []
    sides.append(Sides([new_prefill], [1], [new_decode]))
    assert admission.changed(2.1) == [Admit(b"next")]
    sides.append(old)
    assert admission.arrive(b"last", 2.2, num_tokens=300) == []


def test_a_report_that_there_is_room_lets_the_next_one_go() -> None:
    decode = a_worker(Role.DECODE, 2)
    decode.report(WorkerStatus(reserved_blocks=decode.num_blocks))
    admission = an_admission(decode=decode)
    for number in range(2):
        admission.arrive(key(number), 0.0, num_tokens=10)
    assert admission.arrive(b"next", 0.0, num_tokens=10) == []
    decode.report(WorkerStatus())
    assert admission.changed(0.1, decode) == [Admit(b"next")]


def test_a_prompt_that_turns_out_to_be_cached_makes_room_for_another() -> None:
    admission = an_admission()
    filled(admission)
    admission.arrive(b"next", 0.0, num_tokens=300)
    pair = ChosenPair(PREFILL, DECODE, num_cached=299)
    assert admission.pair_found(key(1), pair, 0.1) == [Admit(b"next")]


def test_while_all_workers_are_silent_nobody_overtakes() -> None:
    """Who comes then waits behind who came before, also where there were places; who is urgent is
    first, as ever."""
    nobody, pair = Sides([], [], []), Sides([PREFILL], [1], [DECODE])
    sides = [nobody]
    admission = an_admission(sides=lambda: sides[-1])
    for name in (b"a", b"b"):
        assert admission.arrive(name, 0.0, num_tokens=10) == []
    assert admission.arrive(b"urgent", 0.5, terms=of("", 7), num_tokens=10) == []
    assert admission.changed(1.0) == []
    sides.append(pair)
    assert admission.changed(1.5) == [Admit(b"urgent"), Admit(b"a"), Admit(b"b")]


@pytest.mark.parametrize("pending", [1000, 0])
def test_where_nobody_can_be_asked_all_hear_of_it_at_once(pending: int) -> None:
    """When that has lasted for as long as anybody may wait, whoever is first; who came later waits
    as long. With limits of their own they hear of those where they are shorter."""
    sides = [Sides([PREFILL], [1], [DECODE])]
    admission = an_admission(sides=lambda: sides[-1], pending=pending)
    if pending:
        filled(admission, num_tokens=9999)
        admission.arrive(b"held", 0.0, num_tokens=300)
    sides.append(Sides([], [], []))
    assert admission.changed(7.0) == []
    for name in (b"a", b"b"):
        assert admission.arrive(name, 7.0, num_tokens=300) == []
    assert admission.arrive(b"c", 8.5, num_tokens=300, deadline_at=8.75) == []
    assert admission.arrive(b"later", 8.5, num_tokens=300) == []
    told = list[TurnAway]()
    while (at := admission.next_tick_at) is not None and at < 9.0:
        told += admission.tick(at)  # type: ignore[arg-type]
    assert [(it.key, type(it.error)) for it in told] == [(b"c", DeadlinePassed)]
    told = admission.tick(9.0)  # type: ignore[assignment]
    assert sorted(it.key for it in told) == [b"a", b"b"] + [b"held"] * bool(pending)
    assert {it.error.code for it in told} == {"no_pair"}
    assert "no pair of workers can take the request: all are silent" in told[0].error.message
    assert admission.tick(10.4) == []
    assert refused(admission.tick(10.5)) == (b"later", "no_pair")


def test_of_a_request_with_many_answers_each_hears_that_there_is_nobody() -> None:
    """Or has its turn, if somebody comes back between two of them."""
    sides = [Sides([PREFILL], [1], [DECODE])]
    admission = an_admission(sides=lambda: sides[-1])
    admission.arrive(b"1", 0.0)
    sides.append(Sides([], [], []))
    for number in (2, 3, 4):
        assert admission.arrive(key(number), 0.1 * number, follows=b"1") == []
    assert refused(admission.tick(2.2)) == (b"2", "no_pair")
    assert refused(admission.tick(2.3)) == (b"3", "no_pair")
    sides.append(sides[0])
    assert admission.changed(2.35) == [Admit(b"4")]


# --- several gateways -----------------------------------------------------------------------------


def test_of_several_gateways_each_has_its_share_and_more_only_as_reports_leave_it() -> None:
    """Of 1,000 tokens at first a half; then a quarter more with each report, as far as the other
    gateway leaves it; and never less than its half."""
    prefill, decode = a_worker(Role.PREFILL, 1), a_worker(Role.DECODE, 2)
    admission = an_admission(sides=lambda: pair)
    pair = Sides([prefill], [1], [decode])

    def reported(now: float, num_tokens: int) -> int:
        """How many go on when the worker has so many tokens of the other gateway."""
        prefill.report(WorkerStatus(num_gateways=2, pending_tokens=num_tokens), now)
        admitted = admission.changed(now, prefill)
        for it in admitted:
            admission.pair_found(it.key, ChosenPair(prefill, decode), now)
            admission.granted(it.key, now)
        return len(admitted)

    assert reported(0.0, 0) == 0
    at_once = [admission.arrive(key(number), 0.1, num_tokens=250) for number in range(9)]
    assert [bool(it) for it in at_once] == [True] * 2 + [False] * 7
    assert [reported(0.1, 600), reported(0.2, 600)] == [0, 0]
    assert [reported(0.3, 250), reported(0.4, 0), reported(0.5, 0)] == [1, 1, 0]
    assert begin(admission, 0) == [Admit(key(4))]
    assert reported(0.6, 900) == 0
    assert [begin(admission, number) for number in (1, 2)] == [[], []]
    assert begin(admission, 3) == [Admit(key(5))]


def test_of_several_gateways_each_has_its_share_of_decodes_places() -> None:
    """Four at once, two for each: all of them where the other has none."""
    decode = a_worker(Role.DECODE, 2)
    admission = an_admission(decode=decode)

    def reported(num_answers: int) -> list[Effect]:
        decode.report(WorkerStatus(max_running=4, num_gateways=2, num_answers=num_answers), 0.0)
        return list(admission.changed(0.0, decode))

    def comes(number: int) -> bool:
        is_in = admission.arrive(key(number), 0.0, num_tokens=1) == [Admit(key(number))]
        if is_in:
            admission.granted(key(number), 0.0)
            begin(admission, number)
        return is_in

    reported(3)
    assert [comes(number) for number in range(3)] == [True, True, False]
    assert reported(2) == []
    assert reported(1) == [Admit(key(2))]
    assert begin(admission, 2) == []
    assert not comes(3)
    assert reported(0) == [Admit(key(3))]


def test_what_others_have_at_a_worker_is_what_it_reports_without_our_own() -> None:
    """Orders that the report has seen, less what need not be computed; where nobody shares the
    worker, its report is all ours, however late it comes."""
    prefill, decode = a_worker(Role.PREFILL, 1), a_worker(Role.DECODE, 2)
    for number in (1, 2, 3):
        prefill.ordered(
            Role.PREFILL, StreamId(number), 100, computes=True, now=0.0, num_cached=10 * number
        )
        decode.ordered(Role.DECODE, StreamId(number), 100, computes=False, now=0.0)
    prefill.computed(StreamId(1))
    seen = StreamId(2)
    for num_gateways, tokens, answers in ((2, 420, 5), (1, 0, 0)):
        status = WorkerStatus(num_gateways=num_gateways, pending_tokens=500, num_answers=7)
        prefill.report(replace(status, seen=seen), 1.0)
        decode.report(replace(status, seen=seen), 1.0)
        assert (prefill.others_tokens, decode.others_answers) == (tokens, answers)
