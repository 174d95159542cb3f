"""DistServe's placement: which are tried, what counts as success, what wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.planner.core.kv_size import PUBLISHED
from services.planner.core.placement import (
    LatencyGoal,
    Placed,
    Placement,
    best_rate,
    high_affinity,
    placements,
    quantile,
)
from services.planner.distserve_data import DistServeData, read_requests
from services.planner.distserve_place import Demand, Placer
from services.sim.baselines.distserve import Latency
from services.sim.baselines.distserve_times import Degree

DATA = Path(__file__).parents[1] / "sim" / "data"


def test_placements_by_hand() -> None:
    """Two heads, two layers, two nodes of two GPUs: few enough to list."""
    shape = replace(PUBLISHED["opt-13b"], num_heads=2, num_layers=2)
    one = Degree(1, 1)
    assert list(placements(shape, 2, 2, "low")) == [Placement(1, one, one), Placement(2, one, one)]
    high = {(str(p.prefill), str(p.decode)) for p in placements(shape, 2, 2, "high")}
    sizes = ["tp1,pp1", "tp1,pp2", "tp2,pp1"]
    assert high == {(p, d) for p in sizes for d in sizes}


@pytest.mark.parametrize("affinity", ["low", "high"])
def test_what_bounds_placements(affinity: str) -> None:
    """Heads and layers are divided, a low-affinity segment stays on its node."""
    shape = PUBLISHED["opt-66b"]
    found = list(placements(shape, 4, 8, "low" if affinity == "low" else "high"))
    for one in found:
        assert shape.num_heads % one.prefill.tp == shape.num_heads % one.decode.tp == 0
        assert (
            shape.num_layers % one.whole_prefill.pp == shape.num_layers % one.whole_decode.pp == 0
        )
        assert one.num_devices <= 32
        if affinity == "low":
            assert one.num_devices // one.segments <= 8
        else:
            assert one.segments == 1
    assert any(one.num_devices == 32 for one in found)


def test_bisection_is_theirs() -> None:
    """0, 5 and 0.25: the grid of their README's 1.56."""
    assert best_rate(lambda rate: rate <= 1.6) == 1.5625
    assert best_rate(lambda rate: False) == 0.0
    assert best_rate(lambda rate: True) == 5 - 5 / 32


def test_the_two_meanings_of_success() -> None:
    """Ten requests, one over each limit: each percentile is kept, both together are not."""
    fine = Latency(100.0, 0.0, 50.0)
    late, slow = Latency(900.0, 0.0, 50.0), Latency(100.0, 0.0, 900.0)
    goal = LatencyGoal(200.0, 100.0, 0.8)
    requests = [fine] * 7 + [late, slow, slow]
    assert not goal.is_met(requests, "joint")
    twenty = [fine] * 16 + [late, late, slow, slow]
    assert LatencyGoal(200.0, 100.0, 0.85).is_met(twenty, "each")
    assert not LatencyGoal(200.0, 100.0, 0.85).is_met(twenty, "joint")
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5


def test_of_equals_fewer_gpus_win() -> None:
    """And a higher rate before that."""
    small = Placed(Placement(1, Degree(1, 1), Degree(1, 1)), 1.0)
    large = Placed(Placement(1, Degree(2, 1), Degree(1, 1)), 1.0)
    fast = Placed(Placement(4, Degree(4, 1), Degree(4, 1)), 1.1)
    assert max([large, small], key=lambda one: one.rank) is small
    assert max([large, small, fast], key=lambda one: one.rank) is fast


def test_algorithm_1_places_each_phase_alone() -> None:
    """Prefill scales with tp, decode with pp; instances are counted for the rate."""
    degrees = [Degree(1, 1), Degree(2, 1), Degree(1, 2)]
    found = high_affinity(
        degrees,
        lambda degree, rate: rate <= 1.5 * degree.tp**1.5 * degree.pp,
        lambda degree, rate: rate <= 1.5 * degree.pp**1.5 * degree.tp,
        10.0,
    )
    assert found is not None
    prefill, decode = found
    assert (prefill.degree, decode.degree) == (Degree(2, 1), Degree(1, 2))
    assert prefill.num == -int(-10.0 // prefill.rate)
    assert high_affinity(degrees, lambda d, r: False, lambda d, r: True, 1.0) is None


@pytest.mark.slow
def test_four_gpus_and_opt_13b() -> None:
    """Their README's case by our lengths: prefill at tp 2 wins at 1.56 requests/s a GPU there, too;
    the answers are longer than ShareGPT's, so that decode takes a second GPU."""
    (path,) = (
        path
        for path in DATA.glob("*.csv")
        if "simdistserve" in path.name and "made" not in path.name
    )
    lengths = [(one.prompt_len, one.output_len) for one in read_requests(path)]
    for success in ("each", "joint"):
        placer = Placer(
            DistServeData(DATA, "distserve"),
            "opt-13b",
            Demand.drawn(lengths, 300, 0),
            LatencyGoal(200.0, 100.0),
            success,
        )
        found = list(placer.together(placer.candidates(1, 4, "low")))
        best = max(found, key=lambda one: one.rank)
        assert best.placement.prefill == Degree(2, 1)
        assert best.rate_per_gpu == 1.5625
        assert best.rate_per_gpu >= max(one.rate_per_gpu for one in found)
