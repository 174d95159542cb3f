"""The search for the goodput: right on curves that fall, and never fooled by ones that do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.cli.bench.search import RateSearch


def searched(search: RateSearch, curve: Callable[[float], float]) -> list[float]:
    """Run a search over a curve; the rates that it tried."""
    tried: list[float] = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.add(rate, curve(rate))
    return tried


@pytest.mark.parametrize("knee", [0.013, 0.7, 1.0, 3.3, 57.0, 800.0])
def test_finds_the_knee_of_a_curve_that_falls(knee: float) -> None:
    """Within the tolerance, from below, wherever it begins."""
    search = RateSearch(first=1.0, tolerance=0.05, most_runs=40)
    searched(search, lambda rate: 1.0 if rate <= knee else 0.5)
    assert knee / 1.06 <= search.best <= knee


def test_doubles_then_bisects() -> None:
    """No rate is tried twice."""
    search = RateSearch(first=1.0, tolerance=0.2)
    tried = searched(search, lambda rate: 1.0 if rate <= 5 else 0.0)
    assert tried == [1, 2, 4, 8, 6, 5]
    assert (search.best, search.lowest_miss) == (5, 6)


def test_a_lucky_run_above_a_miss_does_not_count() -> None:
    """A curve with a hole: what lies above it is never believed."""
    search = RateSearch(first=1.0)
    searched(search, lambda rate: 0.0 if 3 < rate < 5 else 1.0)
    assert search.best <= 3
    assert all(rate < 5 for rate, _ in search.tried)


def test_a_server_that_attains_nothing() -> None:
    """The answer is 0, after some halving."""
    search = RateSearch(first=1.0)
    tried = searched(search, lambda rate: 0.0)
    assert tried[:3] == [1.0, 0.5, 0.25]
    assert search.best == 0.0
    assert len(tried) <= 16


def test_below_the_lowest_rate_nothing_is_tried() -> None:
    """What lies below is called 0, for a run there would take too long."""
    search = RateSearch(first=1.0, lowest=0.2)
    assert searched(search, lambda rate: 0.0) == [1.0, 0.5, 0.25]
    assert search.best == 0.0


def test_a_server_without_a_limit_ends_the_search() -> None:
    """After so many runs; nothing missed."""
    search = RateSearch(first=1.0, most_runs=5)
    assert searched(search, lambda rate: 1.0) == [1, 2, 4, 8, 16]
    assert (search.best, search.lowest_miss) == (16, None)
    assert not search.is_conclusive


@pytest.mark.parametrize(("most_runs", "is_conclusive"), [(5, False), (6, True)])
def test_a_search_that_was_cut_short_says_so(most_runs: int, is_conclusive: bool) -> None:
    """Of 3.5 and 4 requests/s the first attains and the other does not: more than a tenth."""
    search = RateSearch(first=1.0, most_runs=most_runs)
    searched(search, lambda rate: float(rate < 3.9))
    assert search.is_conclusive == is_conclusive


def test_noise_at_the_knee_keeps_the_order() -> None:
    """Whatever the noise, the answer attained and lies below every miss."""
    for phase in range(20):
        search = RateSearch(first=2.0)
        searched(search, lambda rate, phase=phase: 0.9 + 0.1 * ((rate * 37 + phase) % 3 - 1))
        misses = [rate for rate, share in search.tried if share < 0.9]
        assert search.best == 0 or search.best in [rate for rate, _ in search.tried]
        assert all(search.best < rate for rate in misses)
