"""What is asked of the mesh, as one gateway counts it for all."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.core.scaling.traffic import RECENT_SECONDS, SECONDS, Attainment, TrafficMeter
from shared.ids import Incarnation
from shared.predict.step_time import MIN_STEPS, NO_FIT, StepFit

WORKER = Incarnation(1)


def meter(num_ended: int = 10, *, ttft_s: float = 0.5, tpot_s: float = 0.01) -> TrafficMeter:
    """One that has seen answers end, of prompts of 0.2 s."""
    made = TrafficMeter(1.0, 0.05, 0.0)
    for _ in range(num_ended):
        answered(made, 0.2, ttft_s=ttft_s, tpot_s=tpot_s)
    return made


ANSWER: Any = {
    "is_whole": True, "has_left": False, "num_attempts": 1, "step_tokens": 1 << 20,
    "num_prompt": 400, "num_cached": 0, "num_output": 20, "ttft_s": 0.5, "tpot_s": 0.01,
}  # fmt: skip


def answered(made: TrafficMeter, prompt_s: float, **facts: Any) -> None:
    """An answer has ended whose prompt takes so long, in one step."""
    made.ended(30.0, steps=StepFit(prompt_s, 0.0, 0.0, MIN_STEPS), **{**ANSWER, **facts})


def test_it_says_nothing_before_it_knows() -> None:
    """Neither at once, nor before some answers have ended."""
    made = meter(3)
    made.asked(1.0)
    assert made.traffic(5.0) is None
    assert made.traffic(40.0) is None
    assert TrafficMeter(1.0, 0.05, 0.0).traffic(40.0) is not None  # nobody asks: that is known


def test_rates_and_lengths() -> None:
    """Of the last minute, and of its newest part."""
    made = meter()
    for tick in range(120):
        made.asked(tick * 1.0)
        if tick >= 110:
            made.asked(tick * 1.0)
    asked = made.traffic(119.9)
    assert asked is not None
    assert asked.arrivals_s == pytest.approx((SECONDS + 10) / SECONDS)
    assert asked.recent_s == pytest.approx((RECENT_SECONDS + 10) / RECENT_SECONDS)
    assert (asked.prompt_s, asked.prompt_tokens, asked.output_tokens) == (0.2, 400.0, 20.0)
    assert asked.prompt_square_s == pytest.approx(0.04)
    assert set(asked.prompts_s) == {0.2}


def test_one_gateway_sends_all_however_late_it_looks() -> None:
    """Looks that wait for an order are farther apart: what was sent is counted between the same
    two as what workers took."""
    made = meter()
    for tick in range(200):
        made.asked(tick * 1.0)
        made.sent(tick * 1.0)
        if tick % 19 == 0:
            made.taken(tick + 0.5, {WORKER: tick + 1})
    asked = made.traffic(199.5)
    assert asked is not None
    assert asked.arrivals_s == pytest.approx(1.0)


def test_what_other_gateways_send_is_counted_by_the_workers() -> None:
    """Three times as much was taken as this one has sent."""
    made = meter()
    made.taken(30.0, {WORKER: 1000})
    for tick in range(31, 51):
        made.asked(float(tick))
        made.sent(float(tick))
    made.taken(50.0, {WORKER: 1060, Incarnation(2): 500})  # who is new says nothing yet
    asked = made.traffic(50.0)
    assert asked is not None
    assert asked.arrivals_s == pytest.approx(3 * 20 / 50)


def test_a_gateway_without_traffic_of_its_own_knows_nothing() -> None:
    """Others have all of it: their requests' lengths are not seen here."""
    made = meter()
    made.taken(30.0, {WORKER: 0})
    made.taken(90.0, {WORKER: 60})
    assert made.traffic(90.0) is None


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "attained"),
    [
        (0.5, 0.01, Attainment(10, 10, 10, 10)),
        (1.5, 0.01, Attainment(10, 0, 10, 0)),
        (0.5, 0.09, Attainment(10, 10, 0, 0)),
    ],
)
def test_answers_are_judged_by_each_limit(
    ttft_s: float, tpot_s: float, attained: Attainment
) -> None:
    """And by both."""
    assert meter(ttft_s=ttft_s, tpot_s=tpot_s).attainment(31.0) == attained


def test_refusals_count_as_missed_and_who_had_no_chance_is_not_judged() -> None:
    """A prompt of 2 s cannot be in time with a limit of 1 s. Nor is who left early, what workers
    failed at, and what nobody knows the steps of; a minute later all is forgotten."""
    made = meter()
    for how in (
        {"num_attempts": 0},  # refused
        {"num_attempts": 0, "has_left": True},
        {"num_attempts": 2, "ttft_s": None},
    ):
        answered(made, 0.2, is_whole=False, **how)
    answered(made, 2.0, num_prompt=4000, num_output=2, ttft_s=2.1)
    made.ended(30.0, steps=NO_FIT, **ANSWER)
    made.ended(30.0, steps=None, **ANSWER)
    attained = made.attainment(31.0)
    assert (attained.num_judged, attained.num_refused) == (10, 1)
    assert attained.share == pytest.approx(10 / 11)
    assert made.attainment(95.0).share is None
