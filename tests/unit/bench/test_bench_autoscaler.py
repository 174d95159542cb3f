"""bench/autoscaler: flaps, recovery and the oracle are counted as its README says."""

from __future__ import annotations

import math

import pytest

from bench.autoscaler.run import (
    BLOCK_S,
    DAY,
    HOUR_S,
    PEAK_RATE,
    STARTUP_S,
    Felt,
    day_rate,
    flaps,
    least,
    oracle_device_s,
    recovered_s,
    requests,
)
from bench.autoscaler.scaled import Change
from services.gateway.core.scaling.scaling import Kind


def changes(*steps: tuple[float, int, int], kind: Kind = Kind.PREFILL) -> list[Change]:
    """At a time from one number to another."""
    return [Change(at_s, kind, before, after, "") for at_s, before, after in steps]


def test_a_rise_and_a_fall_of_one_number_within_ten_minutes_is_a_flap() -> None:
    """In either order; two rises are none, nor is another role's fall."""
    assert flaps(changes((0, 1, 2), (599, 2, 1))) == 1
    assert flaps(changes((0, 2, 1), (599, 1, 2), (900, 2, 1))) == 2
    assert flaps(changes((0, 1, 2), (10, 2, 4), (610, 4, 3))) == 0
    assert flaps([*changes((0, 1, 2)), *changes((5, 2, 1), kind=Kind.DECODE)]) == 0


def test_it_has_recovered_when_five_minutes_and_all_that_follows_are_kept() -> None:
    """A minute of misses after the step, and a single one later."""
    felt = [Felt(float(at), not 100 <= at < 160) for at in range(0, 1000)]
    felt[700] = felt[700]._replace(kept=False)
    after_s = recovered_s(felt, 100.0)
    assert 40 <= after_s <= 60  # of 300, fifteen may be missed
    assert recovered_s([it._replace(kept=False) for it in felt], 100.0) == math.inf


def test_the_day_has_its_shape_and_its_requests() -> None:
    """The rate at the table's hours, and as many arrivals as the curve has below it."""
    for hour, share in DAY:
        assert day_rate(hour * HOUR_S) == pytest.approx(share * PEAK_RATE)
    asks = list(requests(day_rate, PEAK_RATE, 6 * HOUR_S, seed=3))
    expected = sum(day_rate(at * 60.0) * 60 for at in range(360))
    assert len(asks) == pytest.approx(expected, rel=0.05)
    assert asks == list(requests(day_rate, PEAK_RATE, 6 * HOUR_S, seed=3))


def test_the_oracle_takes_the_least_that_attains_and_pays_for_starts() -> None:
    """One worker up to 0.5 requests/s, two above; the second starts once."""
    rates = {"prefill": [0.5, 1.2], "decode": [2.0]}
    assert (least(rates["prefill"], 0.5), least(rates["prefill"], 0.6)) == (1, 2)
    device_s = oracle_device_s(rates, lambda at_s: 0.2 if at_s < BLOCK_S else 1.0, 3 * BLOCK_S)
    assert device_s == pytest.approx((1 + 2 + 2 + 3) * BLOCK_S + STARTUP_S)
