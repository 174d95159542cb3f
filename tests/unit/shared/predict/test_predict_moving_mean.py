"""A mean of late."""

from __future__ import annotations

from shared.predict.moving_mean import MovingMean


def test_the_first_value_of_a_moving_mean_counts_whole() -> None:
    """Otherwise the first steps would look fast."""
    mean = MovingMean(weight=0.5)
    mean.add(4.0)
    assert mean.value == 4.0
    mean.add(2.0)
    assert mean.value == 3.0
