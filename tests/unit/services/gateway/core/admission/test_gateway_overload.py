"""Overload: which limit would be missed, by how much, and when to come back."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from services.gateway.core.admission.admission import Admission, Admit, Effect
from services.gateway.core.admission.overload import (
    Asking,
    ChosenPair,
    Overload,
    OverloadMode,
    ReportedSpeeds,
)
from services.gateway.core.admission.tenants import Tenants, Terms
from services.gateway.core.index.fetches import Hit
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Role, WorkerStatus
from shared.errors import WouldBeLate
from shared.predict.step_time import StepFit
from shared.tenants import Tenant
from tests.support.overload_mesh import Speed
from tests.support.routing import a_worker

SPEED = Speed(prompt_tokens_per_s=1000.0, base_s=0.02, answer_s=0.01)


def sides(num_pairs: int = 1, *, pending: int = 0, answers: int = 0) -> Sides:
    """Pairs with this load each."""
    prefills = [a_worker(Role.PREFILL, 1 + idx) for idx in range(num_pairs)]
    decodes = [a_worker(Role.DECODE, 1001 + idx, bit=1 << idx) for idx in range(num_pairs)]
    for worker in prefills:
        worker.report(WorkerStatus(pending_tokens=pending))
    for worker in decodes:
        worker.report(WorkerStatus(num_running=answers, num_answers=answers))
    return Sides(prefills, [(1 << num_pairs) - 1] * num_pairs, decodes)


def pair_of(at: Sides) -> ChosenPair:
    """The first prefill worker and the first decode worker."""
    return ChosenPair(at.prefills[0], at.decodes[0])


def refused(
    mode: str, at: Sides, num_tokens: int = 500, waited_s: float = 0.0, **limits: float
) -> WouldBeLate | None:
    overload = Overload(OverloadMode(mode), SPEED)
    asking = Asking(Terms(**limits), num_tokens, waited_s)  # type: ignore[arg-type]
    return overload.late_anywhere(asking, at, 10.0)


def test_a_queue_that_is_too_long_is_refused_with_the_time_that_it_takes() -> None:
    """0.5 s for its own prompt behind 2 s of others."""
    error = refused("early", sides(pending=2000), ttft_s=1.0)
    assert error is not None
    assert (error.code, error.param, error.retry_after_s) == ("slo_ttft", "ttft_ms", 1.5)
    assert "time to first token would be 2.5 s, 1.5 s over its limit" in error.message
    assert "come back in 1.5 s" in error.message
    assert refused("early", sides(pending=400), ttft_s=1.0) is None
    assert refused("early", sides(pending=400), waited_s=0.2, ttft_s=1.0) is not None


def test_a_limit_that_no_idle_worker_keeps_says_which_one_could_keep() -> None:
    """To come back would not help; nor would a shorter prompt, between tokens."""
    never = "which even an idle worker cannot keep: raise"
    error = refused("early", sides(pending=500), num_tokens=3000, ttft_s=1.0)
    assert error is not None
    assert error.message.endswith(f"{never} ttft_ms to 3000, or shorten the prompt")
    assert error.retry_after_s == 0.0
    error = refused("early", sides(answers=3), tpot_s=0.0299)
    assert error is not None
    assert error.message.endswith(f"{never} tpot_ms to 30")
    assert error.retry_after_s == 0.0
    at_decode = Overload(OverloadMode.STAGE, SPEED).refusal_at_decode(
        Terms(tpot_s=0.0299), 500, sides(answers=3).decodes[0], 0.0
    )
    assert at_decode is not None
    assert at_decode.message.endswith(f"{never} tpot_ms to 30")
    error = refused("early", sides(pending=2_000_000), ttft_s=1.0)
    assert error is not None
    assert "would be 2000 s, 2000 s over its limit, come back in 2000 s" in error.message


def test_what_a_cache_has_need_not_be_computed() -> None:
    """By the worker that has it, behind its own queue."""
    at = sides(2)
    first, second = at.prefills
    first.bit, second.bit = 1, 2
    overload, terms = Overload(OverloadMode.EARLY, SPEED), Terms(ttft_s=1.0)

    def is_refused(tokens: int) -> bool:
        asking, cached = Asking(terms, 3000, 0.0), {second.place: Hit(tokens)}
        return overload.late_anywhere(asking, at, 0.0, lambda now: cached) is not None

    assert is_refused(1999)
    assert not is_refused(2000)
    second.report(WorkerStatus(pending_tokens=1))
    assert is_refused(2000)


@pytest.mark.parametrize(
    ("mode", "code"), [("off", ""), ("stage", ""), ("early", "slo_tbt"), ("predicted", "slo_tbt")]
)
def test_decode_counts_at_arrival_unless_each_stage_has_its_turn(mode: str, code: str) -> None:
    """Nine answers leave no room for a tenth within 0.11 s."""
    error = refused(mode, sides(answers=9), tpot_s=0.11)
    assert ("" if error is None else error.code) == code


def test_both_limits_missed_is_one_error() -> None:
    error = refused("early", sides(pending=2000, answers=9), ttft_s=1.0, tpot_s=0.1)
    assert error is not None
    assert error.code == "slo_both"


def test_who_has_no_limit_and_where_nothing_is_known_nobody_is_refused() -> None:
    """Also if nobody could take the request: that is not for admission to say."""
    assert refused("predicted", sides(pending=10**6, answers=500)) is None
    assert refused("predicted", Sides([], [], []), ttft_s=0.001) is None
    overload = Overload(OverloadMode.PREDICTED)
    at = sides(pending=10**6, answers=500)
    asking = Asking(Terms(ttft_s=0.1, tpot_s=0.1), 9000, 0.0)
    assert overload.late_anywhere(asking, at, 0.0) is None


def test_the_wait_for_a_place_is_that_of_a_burst_not_of_the_quiet_before_it() -> None:
    """The first burst after an hour: places come free every 0.1 s, so half a second is enough for
    who is third."""
    at = sides()
    admission = Admission(
        max_running=1,
        max_waiting=9,
        max_wait_s=9.0,
        overload=Overload(OverloadMode.EARLY, SPEED),
        sides=lambda: at,
    )
    admission.arrive(b"a", 3600.0)
    for number in range(3):
        admission.arrive(b"%d" % number, 3600.0)
    for number, key in enumerate((b"a", b"0"), 1):
        assert admission.leave(key, 3600.0 + 0.1 * number) == [Admit(b"%d" % (number - 1))]
    terms = Terms(ttft_s=0.5)
    assert admission.arrive(b"late", 3600.2, terms=terms, num_tokens=100) == []


@pytest.mark.parametrize(
    ("places", "of_flood", "at_once"), [(4, 1, [Admit(b"late")]), (1, None, [])]
)
def test_a_flood_of_another_tenant_makes_nobody_late(
    places: int, of_flood: int | None, at_once: list[Admit]
) -> None:
    """Its fifty requests wait for a place of their own tenant's, or have one turn before it: who
    comes has a place at once, or soon."""
    at = sides()
    admission = Admission(
        max_running=places,
        max_waiting=99,
        max_wait_s=99.0,
        overload=Overload(OverloadMode.EARLY, SPEED),
        sides=lambda: at,
        tenants=Tenants({"flood": Tenant(max_running=of_flood)}),
    )
    for number in range(50):
        admission.arrive(b"%d" % number, 0.0, terms=Terms("flood"), num_tokens=100)

    def ended(number: int) -> list[Effect]:
        admission.pair_found(b"%d" % number, pair_of(at), 0.2 * number)
        admission.emitted(b"%d" % number, 1, 0.2 * number, cached_tokens=0)
        return admission.leave(b"%d" % number, 0.2 * number)

    for number in range(9):
        ended(number)
    terms = Terms("late", ttft_s=0.6)
    assert admission.arrive(b"late", 1.7, terms=terms, num_tokens=100) == at_once
    assert Admit(b"late") in at_once + ended(9) + ended(10)


@pytest.mark.parametrize("further_one_has_a_token", [False, True])
def test_a_request_with_several_answers_is_refused_before_a_token_or_not_at_all(
    further_one_has_a_token: bool,
) -> None:
    """By the limits that its first answer would miss; however late the others come, and also where
    one of them has its token before the first one has."""
    at, terms = sides(), Terms(ttft_s=1.0, tpot_s=0.05)
    overload = Overload(OverloadMode.STAGE, SPEED)
    admission = Admission(
        max_running=2, max_waiting=0, max_wait_s=9.0, overload=overload, sides=lambda: at
    )
    for key, follows in ((b"1", b""), (b"2", b"1"), (b"3", b"1")):
        admission.arrive(key, 0.0, terms=terms, num_tokens=100, follows=follows)
    for key in (b"1", b"2"):
        admission.pair_found(key, pair_of(at), 0.0)
    at.decodes[0].report(WorkerStatus(num_running=500, num_answers=500))
    if further_one_has_a_token:
        assert admission.prompt_computed(b"2", 0.1) == []
    refusals = admission.prompt_computed(b"1", 0.1)
    assert [it.error.code for it in refusals] == ([] if further_one_has_a_token else ["slo_tbt"])
    assert admission.tick(30.0) == []
    assert admission.leave(b"2", 30.0) == [Admit(b"3")]


def _in_hand(overload: Overload, at: Sides, num: int, now: float) -> None:
    """This many answers run on the first pair since then, and are counted there."""
    for number in range(num):
        overload.dispatched(number, pair_of(at), 100, now)
        overload.began(number, now)
    at.decodes[0].report(WorkerStatus(num_running=num, num_answers=num))


@pytest.mark.parametrize("was_lost", [False, True])
def test_a_prediction_counts_who_will_have_ended(was_lost: bool) -> None:
    """Answers last 10 s in the mean: with 5 s of queue before it most of 40 are gone, and what is
    early is refused that is not by prediction. One whose worker was lost has lasted, too."""
    terms = Terms(ttft_s=100.0, tpot_s=0.4)
    verdicts = {}
    for mode in ("early", "predicted"):
        overload = Overload(OverloadMode(mode), SPEED)
        at = sides(pending=15_000)
        _in_hand(overload, at, 1, 0.0)
        if was_lost:
            overload.dispatched(0, pair_of(at), 100, 5.0)
        overload.ended(0, 10.0)  # the mean
        _in_hand(overload, at, 40, 20.0)
        verdicts[mode] = overload.late_at(Asking(terms, 100, 0.0), pair_of(at), 20.0)
    assert verdicts["early"] is not None
    assert verdicts["early"].code == "slo_tbt"
    assert 0.1 <= verdicts["early"].retry_after_s <= 10.0
    assert verdicts["predicted"] is None


def test_answers_that_lasted_no_time_say_how_long_others_will() -> None:
    """All tokens of a short one come in one instant of the clock."""
    overload, at = Overload(OverloadMode.PREDICTED, SPEED), sides()
    _in_hand(overload, at, 1, now=0.0)
    overload.ended(0, 0.0)
    _in_hand(overload, at, 9, now=0.0)
    forecast = overload.forecast(Asking(Terms(), 500, 0.0), pair_of(at), 0.0)
    assert forecast.tbt_s < 0.05  # as good as alone


def test_the_second_look_sees_what_runs_then() -> None:
    """When the prompt is computed; who waits for its own prompt does not count."""
    overload = Overload(OverloadMode.STAGE, SPEED)
    at = sides()
    decode = at.decodes[0]
    _in_hand(overload, at, 9, 0.0)
    overload.dispatched("mine", pair_of(at), 100, 0.0)
    assert overload.refusal_at_decode(Terms(tpot_s=0.121), 100, decode, 1.0) is None
    error = overload.refusal_at_decode(Terms(tpot_s=0.11), 100, decode, 1.0)
    assert error is not None
    assert error.code == "slo_tbt"
    assert overload.refusal_at_decode(Terms(ttft_s=0.1), 100, decode, 1.0) is None


def test_one_token_has_no_time_between_tokens() -> None:
    """What is sent to a prefill worker alone is not late at a decode worker."""
    overload, at = Overload(OverloadMode.EARLY, SPEED), sides(answers=9)
    asking, pair = Asking(Terms(tpot_s=0.1), 100, 0.0), pair_of(at)
    assert overload.late_at(asking, pair, 0.0) is not None
    assert overload.late_at(asking, pair._replace(decode=None), 0.0) is None


def test_a_prefix_counts_with_the_time_that_it_takes_to_come() -> None:
    """0.1 s for what is left to compute, and 0.3 s beyond the queue until the rest is there."""
    overload, at = Overload(OverloadMode.EARLY, SPEED), sides()
    pair = pair_of(at)._replace(num_cached=900, prefix_s=0.3)
    late = [
        overload.late_at(Asking(Terms(ttft_s=ttft_s), 1000, 0.0), pair, 0.0) is not None
        for ttft_s in (0.39, 0.41)
    ]
    assert late == [True, False]


def test_a_refusal_costs_less_than_five_milliseconds() -> None:
    """With 64 + 64 workers and 1024 answers in hand; measured 0.1 ms, and 0.3 ms at 500 + 500."""
    overload = Overload(OverloadMode.PREDICTED, SPEED)
    at = sides(64, pending=2000, answers=16)
    for number in range(1024):
        pair = ChosenPair(at.prefills[0], at.decodes[number % 64])
        overload.dispatched(number, pair, 100, 0.0)
        overload.began(number, 0.0)
    asking = Asking(Terms(ttft_s=1.0, tpot_s=0.05), 500, 0.0)
    times: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        assert overload.late_anywhere(asking, at, 1.0) is not None
        times.append(time.perf_counter() - start)
    assert sorted(times)[4] < 0.005


def test_speeds_are_what_the_workers_report() -> None:
    """A prompt by its steps behind those that wait, an answer's step by how many others there are,
    their context and its own; and nothing of a worker that has been wrong."""
    speeds = ReportedSpeeds()
    prompt_steps = StepFit(0.01, 0.001, num_steps=50)
    prefill = a_worker(Role.PREFILL, 1)
    assert speeds.prompt_s(prefill, 100) == 0.0
    prefill.report(WorkerStatus(queue_s=2.0, prompt_steps=prompt_steps, step_tokens=64), 10.0)
    assert speeds.queue_s(prefill, 10.5) == pytest.approx(1.5)
    assert speeds.prompt_s(prefill, 100) == pytest.approx(0.12)  # two steps
    prefill.is_believed = False
    assert speeds.queue_s(prefill, 10.5) == speeds.prompt_s(prefill, 100) == 0.0

    decode = a_worker(Role.DECODE, 2)
    assert speeds.step_s(decode, 20, 100) == 0.0
    answer_steps = StepFit(0.01, 0.001, 1e-5, num_steps=50)
    status = WorkerStatus(num_answers=2, reserved_blocks=10, answer_steps=answer_steps)
    decode.report(status, 10.0)  # 80 tokens of context each
    assert speeds.step_s(decode, 19, 500) == pytest.approx(0.01 + 0.02 + (19 * 80 + 500) * 1e-5)
    decode.is_believed = False
    assert speeds.step_s(decode, 20, 100) == 0.0


@pytest.mark.parametrize("mode", ["early", "predicted"])
def test_one_that_is_not_predicted_ends_no_refusal(mode: str) -> None:
    """The forecast is that of the others, on either side; where nobody is predicted nobody is
    refused."""
    at = sides(2)
    fit = StepFit(0.1, 0.001, num_steps=50)
    for worker in (*at.prefills, *at.decodes):
        worker.report(replace(worker.status, queue_s=9.0, prompt_steps=fit, answer_steps=fit), 0.0)
    overload, limits = Overload(OverloadMode(mode)), Terms(ttft_s=1.0, tpot_s=0.05)

    def code() -> str | None:
        error = overload.late_anywhere(Asking(limits, 500, 0.0), at, 0.0)
        return error and error.code

    assert code() == "slo_both"
    at.prefills[0].is_believed = False
    at.decodes[1].report(WorkerStatus())
    assert code() == "slo_both"
    at.prefills[1].report(WorkerStatus())
    assert code() == "slo_tbt"
    at.decodes[0].is_believed = False
    assert code() is None
