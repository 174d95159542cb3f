"""The definitions of what a client measures."""

from __future__ import annotations

import pytest

from shared.telemetry.definitions import RequestOutcome, percentiles


def test_messages_of_several_tokens_do_not_flatter_itl() -> None:
    """Their tokens have no gap between them; TPOT counts them all."""
    outcome = RequestOutcome(0.0, [1.0, 1.0, 1.4, 1.4])
    assert outcome.tbt_s == pytest.approx([0.0, 0.4, 0.0])
    assert outcome.itl_s == pytest.approx([0.4])
    assert outcome.tpot_s == pytest.approx(0.4 / 3)


def test_percentiles_come_from_one_order() -> None:
    """Nearest rank, as ``percentile``."""
    assert percentiles([3.0, 1.0, 2.0], (0, 50, 100)) == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="no values"):
        percentiles([], (50,))
