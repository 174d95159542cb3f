"""What was seen, replayed: prompts of which as much is cached, and how far figures are off."""

from __future__ import annotations

import pytest

from services.planner.core.replay import (
    SeenRequest,
    are_unequal,
    compare,
    fitted_times,
    replay_of,
    terms_of,
)
from shared.predict.step_time import NO_FIT, StepFit
from shared.telemetry.definitions import Slo

SLO = Slo(1.0, 0.1)


def seen(num_prompt: int = 10, num_cached: int = 0, worker: str = "a") -> SeenRequest:
    return SeenRequest(0.0, num_prompt, 4, 0.2, 0.02, num_cached=num_cached, worker=worker)


def test_prompts_have_in_common_what_was_cached() -> None:
    """With the latest earlier one of the worker that is long enough, else with one before all."""
    asked = [seen(30), seen(8), seen(40, 20), seen(40, 20, "b"), seen(50, 35)]
    (seed,), prompts = replay_of(asked)
    first, short, third, other, last = prompts
    assert [len(it) for it in prompts] == [30, 8, 40, 40, 50]
    assert third[:20] == first[:20]
    assert third[20] != first[20]
    assert last[:35] == third[:35]
    assert short[0] not in (first[0], third[0])
    assert other[:20] == seed[:20]
    assert seed[0] not in {token for prompt in (first, short, third, last) for token in prompt}
    _, (whole,) = replay_of([seen(10, 10)])  # the last token is always computed
    assert len(whole) == 10


def test_what_workers_report_is_one_time_model() -> None:
    """The mean of those that know; nobody may be missing on either side."""
    one, other = StepFit(0.01, 1e-4, 0.0, 50), StepFit(0.03, 3e-4, 0.0, 50)
    times = fitted_times([one, NO_FIT, other], [one])
    assert times is not None
    assert times.step_s(100, 5050, 0, 0) == pytest.approx(0.02 + 0.02)
    assert times.step_s(0, 0, 2, 100) == pytest.approx(0.01 + 2e-4)
    assert times.warnings() == []
    times = fitted_times([one, other._replace(num_steps=101)], [one])
    assert times is not None
    assert times.step_s(100, 5050, 0, 0) == pytest.approx(0.03 + 0.03)
    assert fitted_times([one], [NO_FIT]) is None
    assert fitted_times([], [one]) is None
    assert are_unequal([one, other], 100, 5050)
    assert not are_unequal([one, one, NO_FIT], 100, 5050)


def test_errors_are_of_what_was_seen_and_the_term_that_is_off_is_named() -> None:
    """Terms add up; what goes on is judged on neither side."""
    terms = terms_of(0.2, 0.02, 5, gateway=0.01, prefill_queue=0.05, prefill=0.1, first_gap_s=0.04)
    assert sum(terms[:4]) == pytest.approx(0.2)
    assert sum(terms[4:]) == pytest.approx(0.02)
    was = [seen()._replace(terms=terms)] * 3 + [seen()._replace(is_over=False)]
    wrong = terms._replace(prefill_queue=0.09, later_gaps=0.0085)
    said = [it._replace(ttft_s=0.23, tpot_s=0.0185, terms=wrong) for it in was[:3]]
    found = compare(was, [*said, seen()._replace(ttft_s=99.0)], SLO)
    errors = {it.name: (it.error, it.is_kept) for it in found.figures}
    assert errors["attainment"] == (0.0, True)
    assert errors["TTFT p50"] == (pytest.approx(0.15), False)
    assert errors["TTFT p99"] == (pytest.approx(0.15), True)
    assert errors["TPOT p50"] == (pytest.approx(-0.075), True)
    worst = found.worst("TTFT")
    assert worst is not None
    assert (worst.name, worst.seen) == ("prefill_queue", pytest.approx(0.05))
    assert worst.predicted == pytest.approx(0.09)
    assert found.worst("TPOT") is None
    assert not found.is_kept


def test_attainment_counts_what_failed_and_figures_leave_it_out() -> None:
    """A request that the mesh did not finish has missed its limits."""
    failed = seen()._replace(is_whole=False, tpot_s=9.0)
    found = compare([seen(), failed], [seen(), seen()], SLO)
    share, ttft = found.figures[0], found.figures[1]
    assert (share.seen, share.predicted, share.error, share.is_kept) == (0.5, 1.0, 0.5, False)
    assert ttft.error == 0.0
    assert {it.seen for it in found.figures if it.name.startswith("TPOT")} == {0.02}
    assert found.worst("TTFT") is None
