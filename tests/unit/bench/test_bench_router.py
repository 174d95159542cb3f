"""bench/router measures production's decisions: its smallest runs."""

from __future__ import annotations

from bench.router.run import measure_decisions, measure_index, measure_prompts


def test_every_policy_decides() -> None:
    """All of them take the request."""
    rows = list(measure_decisions(2, is_busy=True, repetitions=1, seconds=0.0))
    assert {row["policy"] for row in rows} >= {"least_loaded", "conductor"}


def test_a_long_prompt_is_decided() -> None:
    """Its workers' context has room for it."""
    rows = list(measure_prompts(2, repetitions=1, seconds=0.0))
    assert [row["policy"] for row in rows] == ["local", "conductor"]


def test_the_index_is_measured() -> None:
    """What was told is found."""
    row = measure_index(1 << 14, repetitions=1, seconds=0.0)
    assert 0 < row["bytes_a_key"] < row["bytes_a_hot_key"] < 800
