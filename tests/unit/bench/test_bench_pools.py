"""bench/pools: what is sent is the same for all systems, and moving pools are held against the best
fixed split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.pools.run import FACTOR, MOVING, Job, attained_at, set_goals
from bench.record import Record


def a_job(system: str = MOVING, part: str = "step") -> Job:
    return Job(part=part, load="azure-conv", system=system, rate=20.0, seconds=50.0)


def a_row(system: str, rate: float, share: float, part: str = "rates") -> dict[str, Any]:
    return {"load": "x", "part": part, "system": system, "rate": rate, "attainment": share}


@pytest.mark.parametrize("part", ["step", "rates"])
def test_all_systems_get_the_same_requests(part: str) -> None:
    """Lengths and times follow from load, rate and seed alone."""
    assert a_job(part=part).workload() == a_job("2 + 2 fixed", part).workload()


def test_the_middle_third_of_a_step_has_three_times_the_rate() -> None:
    """Within what chance leaves of some thousand arrivals."""
    times = [ask.due_s for ask in a_job().workload().asks]
    before, spike, after = (
        sum(third * 50.0 <= at < (third + 1) * 50.0 for at in times) for third in range(3)
    )
    assert before == pytest.approx(1000, rel=0.1)
    assert spike == pytest.approx(FACTOR * 1000, rel=0.1)
    assert after == pytest.approx(1000, rel=0.1)
    assert times == sorted(times)


def test_pools_are_held_against_the_best_split_of_each_rate_and_the_best_mean() -> None:
    """The split that is best at one rate need not be best at the other."""
    record = Record(Path("pools"), is_quick=True)
    record.rows += [
        *(a_row(MOVING, 1.0, 1.0), a_row("a", 1.0, 1.0), a_row("b", 1.0, 0.5)),
        *(a_row(MOVING, 2.0, 0.8), a_row("a", 2.0, 0.2), a_row("b", 2.0, 0.9)),
        *(a_row(MOVING, 1.0, 0.6, "step"), a_row("a", 1.0, 0.5, "step")),
    ]
    assert attained_at(record.rows[:6])[2.0] == {MOVING: 0.8, "a": 0.2, "b": 0.9}
    set_goals(record, "x")
    least, mean, step = record.goals
    assert least.value == pytest.approx(-0.1)
    assert not least.is_met
    assert mean.value == pytest.approx(0.9 - 0.7)
    assert mean.is_met
    assert step.value == pytest.approx(0.1)
