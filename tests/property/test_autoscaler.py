"""Whatever the load does, and whatever is not known of it: no flapping, no role without a worker,
no more workers than allowed, nothing changed while it holds."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.scaling.autoscaler import OVERFULL
from services.gateway.core.scaling.scaling import DWELL_S, Decision, Kind, Rules
from services.gateway.core.scaling.traffic import Attainment
from tests.support.scaling import RULES, ObedientMesh, traffic, workers

MAX_WORKERS = 12
LOOK_S = 20.0


class Stretch(NamedTuple):
    """A load for some looks. is_known: whether anybody knows it. acts: whether this is the first
    gateway. share: of answers that keep the limits."""

    rate: float
    output: float
    num_looks: int
    is_known: bool
    acts: bool
    share: float


STRETCHES = st.lists(
    st.builds(
        Stretch,
        rate=st.floats(0.0, 15.0),
        output=st.floats(2.0, 400.0),
        num_looks=st.integers(1, 60),
        is_known=st.sampled_from([True] * 7 + [False]),
        acts=st.sampled_from([True] * 7 + [False]),
        share=st.sampled_from([1.0, 1.0, 0.96, 0.8]),
    ),
    min_size=1,
    max_size=8,
)
SHAPES = st.sampled_from([(1, 1, 0), (3, 2, 0), (0, 0, 2), (6, 4, 0)])


def _changes(decisions: list[Decision]) -> dict[Kind, list[tuple[float, int, bool]]]:
    """When this gateway changed each number of wanted workers, by how many, and whether there was
    too much to do."""
    changes: dict[Kind, list[tuple[float, int, bool]]] = {}
    before: dict[Kind, int] = {}
    for number, decision in enumerate(decisions, 1):
        if "another gateway" in decision.hold:
            before = {}
            continue
        for kind, num in decision.wanted.items():
            by = num - before.get(kind, num)
            if by:
                is_overfull = decision.memory.is_refusing
                changes.setdefault(kind, []).append((number * LOOK_S, by, is_overfull))
            before[kind] = num
    return changes


@settings(max_examples=40)
@given(STRETCHES, SHAPES, st.booleans(), st.floats(5.0, 400.0))
def test_no_number_falls_within_ten_minutes_of_a_rise(
    stretches: list[Stretch], shape: tuple[int, int, int], moves: bool, startup_s: float
) -> None:
    """Nor does one rise so soon after a fall, unless work comes faster than it is done."""
    mesh = ObedientMesh(
        list(workers(*shape, moves=moves)),
        startup_s=startup_s,
        look_s=LOOK_S,
        rules=Rules(RULES.limits, MAX_WORKERS),
    )
    kinds = {Kind.COLOCATED} if shape[2] else {Kind.PREFILL, Kind.DECODE}
    for stretch in stretches:
        asked = traffic(stretch.rate, output=stretch.output) if stretch.is_known else None
        kept = round(100 * stretch.share)
        for _ in range(stretch.num_looks):
            before = dict(mesh.memory.targets)
            decision = mesh.look(asked, Attainment(100, kept, kept, kept), acts=stretch.acts)
            assert sum(decision.wanted.values()) <= max(MAX_WORKERS, sum(shape), len(mesh.here))
            if decision.hold and stretch.acts:
                assert decision.orders == ()
                assert decision.wanted == before
            for kind in kinds:
                assert mesh.num(kind) >= 1
    for changes in _changes(mesh.decisions).values():
        for (at, by, _), (then, next_by, is_overfull) in itertools.pairwise(changes):
            if by > 0 > next_by:
                assert then - at >= DWELL_S - LOOK_S, (at, then)
            if by < 0 < next_by and then - at < DWELL_S - LOOK_S:
                assert is_overfull, (at, then)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.floats(0.1, 12.0), st.floats(2.0, 200.0), SHAPES)
def test_an_even_load_comes_to_rest_where_it_fits(
    rate: float, output: float, shape: tuple[int, int, int]
) -> None:
    """After an hour nothing changes any more, and nobody has too much to do."""
    mesh = ObedientMesh(list(workers(*shape)), look_s=LOOK_S)
    mesh.looks(3600, traffic(rate, output=output))
    before = dict(mesh.memory.targets)
    last = mesh.looks(1800, traffic(rate, output=output))
    assert last.wanted == before
    assert last.orders == ()
    assert all(share < OVERFULL for share in last.busy.values())
