"""The fit below all predictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.predict.least_squares import LeastSquares


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 1e4)), min_size=6, max_size=30))
def test_agrees_with_numpy(points: list[tuple[float, float]]) -> None:
    """Where no coefficient is below 0, it says what numpy's does of each value; its error is never
    larger than that of the true line."""
    line, rows = LeastSquares(3, keep=1.0), []
    for number, (a, b) in enumerate(points):
        value = (2.0 + 0.5 * a + 0.01 * b) * (1.1 if number % 2 else 0.95)
        line.observe((1.0, a, b), value)
        rows.append((1.0 / value, a / value, b / value))
    matrix = np.array(rows)
    found = np.array(line.solve())
    right, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    error = float(np.sum((matrix @ found - 1) ** 2))
    truth = float(np.sum((matrix @ np.array([2.0, 0.5, 0.01]) - 1) ** 2))
    assert error <= truth + 1e-3
    if (
        rank == 3
        and np.linalg.cond(matrix / np.linalg.norm(matrix, axis=0)) < 10
        and min(right) > 0
    ):
        assert matrix @ found == pytest.approx(matrix @ right, abs=1e-3)


def test_no_coefficient_is_negative() -> None:
    """Values that fall with a feature: it is taken to cost nothing."""
    line = LeastSquares(2)
    for size in range(1, 20):
        line.observe((1.0, size), 30.0 - size)
    constant, slope = line.solve()
    assert slope == 0.0
    assert 10 < constant < 30


def test_old_values_are_forgotten_but_for_an_anchor() -> None:
    """After a change the new values count; with an anchor they count for most."""
    plain, anchored = LeastSquares(1), LeastSquares(1)
    for line in (plain, anchored):
        for _ in range(100):
            line.observe((1.0,), 1.0)
    anchored.anchor()
    for line in (plain, anchored):
        for _ in range(400):
            line.observe((1.0,), 2.0)
    assert plain.solve()[0] == pytest.approx(2.0, rel=1e-3)
    assert 1.4 < anchored.solve()[0] < 1.9


def test_nothing_seen_is_nothing_said() -> None:
    """All coefficients are 0; a feature that was never there keeps 0."""
    line = LeastSquares(2)
    assert line.solve() == (0.0, 0.0)
    line.observe((1.0, 0.0), 3.0)
    assert line.solve() == pytest.approx((3.0, 0.0), rel=1e-4)
