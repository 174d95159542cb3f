"""How long answers become, and that nobody's own length is looked at before its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.predict.output_length import OutputLengths
from shared.predict.quantiles import RunningQuantiles


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 20), st.floats(0, 1))
def test_quantiles_are_those_of_the_last_values(values: list[int], size: int, share: float) -> None:
    """At least that share of them is not above, and of the next smaller value less is."""
    seen = RunningQuantiles(size)
    for value in values:
        seen.add(value)
    last = values[-size:]
    quantile = seen.quantile(share)
    assert len(seen) == len(last)
    assert quantile in last
    assert sum(value <= quantile for value in last) >= share * len(last)
    smaller = sum(value < quantile for value in last)
    assert smaller == 0 or smaller < share * len(last)


def test_prompt_lengths_are_apart() -> None:
    """Long prompts with short answers, short ones with long answers."""
    lengths = OutputLengths()
    for number in range(20):
        lengths.ended(100, 500 + number)
        lengths.ended(5000, 10)
    assert lengths.quantile(100, 0.5) == 509
    assert lengths.quantile(120, 1.0) == 519
    assert lengths.quantile(5000, 0.9) == 10


def test_too_few_answers_say_nothing() -> None:
    """Then all answers count; and before any came, none."""
    lengths = OutputLengths()
    assert lengths.quantile(100, 0.5) is None
    for _ in range(7):
        lengths.ended(100, 5)
    assert lengths.quantile(100, 0.5) is None
    for _ in range(8):
        lengths.ended(9000, 70)
    assert lengths.quantile(100, 0.9) == 70  # all of them
