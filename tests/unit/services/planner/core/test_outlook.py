"""What a running mesh could still take, by the live planner's own closed forms."""

from __future__ import annotations

import pytest

from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import Kind, MeshSeen, WorkerSeen
from services.gateway.core.scaling.traffic import Traffic, TrafficMeter
from services.planner.core.outlook import outlook
from shared.ids import Incarnation
from shared.predict.step_time import NO_FIT, StepFit

LIMITS = Limits(2.0, 0.1, 0.9)
STEPS = StepFit(0.02, 0.001, 0.0, 100)
TRAFFIC = Traffic(1.0, 2.0, (0.1,) * 20, 0.1, 0.01, 100.0, 10.0)
"""Prompts of 0.1 s, answers of ten tokens; two requests a second now."""


def seen(*kinds: Kind, traffic: Traffic | None = TRAFFIC, steps: StepFit = STEPS) -> MeshSeen:
    workers = tuple(
        WorkerSeen(Incarnation(n), kind, False, False, 0.1, 0, 0.0, steps, steps, 100_000)
        for n, kind in enumerate(kinds, 1)
    )
    return MeshSeen(workers, traffic)


def test_prompts_bind_at_most_of_their_workers_time() -> None:
    """One prefill worker takes ten prompts a second, planned for to 88 %."""
    found = outlook(seen(Kind.PREFILL, Kind.DECODE), LIMITS)
    assert found is not None
    assert (found.binds, found.rate) == (Kind.PREFILL, 2.0)
    assert found.most_rate == pytest.approx(8.8, rel=0.01)
    assert found.headroom == pytest.approx(4.4, rel=0.01)
    two = outlook(seen(Kind.PREFILL, Kind.PREFILL, Kind.DECODE), LIMITS)
    assert two is not None
    assert two.most_rate > 1.9 * found.most_rate


def test_answers_bind_where_they_are_long() -> None:
    """Then another split of as many workers would take more, and it is named."""
    long = TRAFFIC._replace(output_tokens=2000.0, prompt_s=0.01, prompts_s=(0.01,) * 20)
    found = outlook(seen(Kind.PREFILL, Kind.PREFILL, Kind.DECODE, traffic=long), LIMITS)
    assert found is not None
    assert found.binds is Kind.DECODE
    assert found.runner_up is not None
    numbers, rate = found.runner_up
    assert numbers in ({Kind.PREFILL: 1, Kind.DECODE: 2}, {Kind.COLOCATED: 3})
    assert rate > 1.5 * found.most_rate


def test_limits_that_nobody_keeps_leave_no_rate() -> None:
    """And a mesh that nobody asks has no headroom that could be told."""
    late = TRAFFIC._replace(prompts_s=(1.99,) * 20, prompt_s=1.99, prompt_square_s=4.0)
    hard = outlook(seen(Kind.PREFILL, Kind.DECODE, traffic=late), LIMITS)
    assert hard is not None
    assert hard.most_rate < 0.1
    idle = TRAFFIC._replace(arrivals_s=0.0, recent_s=0.0)
    rest = outlook(seen(Kind.COLOCATED, traffic=idle), LIMITS)
    assert rest is not None
    assert (rest.headroom, rest.runner_up) == (None, None)


@pytest.mark.parametrize(
    "mesh",
    [
        seen(Kind.PREFILL),
        seen(Kind.PREFILL, Kind.COLOCATED),
        seen(Kind.PREFILL, Kind.DECODE, traffic=None),
        seen(Kind.PREFILL, Kind.DECODE, traffic=TrafficMeter(2.0, 0.1, 0.0).traffic(60.0)),
        seen(Kind.PREFILL, Kind.DECODE, steps=NO_FIT),
        seen(),
    ],
)
def test_of_what_is_not_known_nothing_is_said(mesh: MeshSeen) -> None:
    """A role without a worker, no traffic, or none since the gateway began, no step times."""
    assert outlook(mesh, LIMITS) is None
