"""The variants of the metrics that papers and simulators use, each by its own words."""

from __future__ import annotations

import pytest

from shared.telemetry.definitions import (
    RequestOutcome,
    Slo,
    TpotRule,
    attainment,
    each_attains,
    percentiles,
)


def test_rules_of_the_time_per_token() -> None:
    """One answer of 21 tokens: 18 gaps of 10 ms, one of 100 ms, one of 300 ms."""
    gaps = [0.01] * 9 + [0.1] + [0.01] * 9 + [0.3]
    times = [1.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    outcome = RequestOutcome(0.0, times)
    assert outcome.tpot_by(TpotRule.MEAN_GAP) == pytest.approx(0.58 / 20)
    assert outcome.tpot_by(TpotRule.PER_TOKEN) == pytest.approx(0.58 / 21)
    assert outcome.tpot_by(TpotRule.LONGEST_TENTH) == pytest.approx(0.2)
    for rule in TpotRule:
        assert RequestOutcome(0.0, [1.0]).tpot_by(rule) == 0.0
        assert RequestOutcome(0.0).tpot_by(rule) == 0.0


def test_the_rule_decides_what_attains() -> None:
    """Mooncake's is the stricter one for an answer that stalls once."""
    outcome = RequestOutcome(0.0, [0.1, 0.11, 0.12, 0.42])
    assert outcome.meets(Slo(1.0, 0.2))
    assert not outcome.meets(Slo(1.0, 0.2, TpotRule.LONGEST_TENTH))


def test_messages_of_several_tokens_do_not_flatter_itl() -> None:
    """Their tokens have no gap between them; TPOT counts them all."""
    outcome = RequestOutcome(0.0, [1.0, 1.0, 1.4, 1.4])
    assert outcome.tbt_s == pytest.approx([0.0, 0.4, 0.0])
    assert outcome.itl_s == pytest.approx([0.4])
    assert outcome.tpot_s == pytest.approx(0.4 / 3)


def test_percentiles_each_on_their_own_are_weaker_than_attainment() -> None:
    """Half are late at first, the other half later on: each limit holds for half of them only, and
    at a target of one half simdistserve is content where DistServe is not."""
    slo = Slo(0.5, 0.05)
    late, slow = RequestOutcome(0.0, [0.9, 0.91]), RequestOutcome(0.0, [0.1, 0.9])
    assert attainment([late, slow], slo) == 0.0
    assert each_attains([late, slow], slo, target=0.5)
    assert not each_attains([late, slow], slo, target=0.9)
    assert not each_attains([RequestOutcome(0.0), late], slo, target=0.9)
    assert each_attains([], slo)


def test_percentiles_come_from_one_order() -> None:
    """Nearest rank, as ``percentile``."""
    assert percentiles([3.0, 1.0, 2.0], (0, 50, 100)) == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="no values"):
        percentiles([], (50,))
