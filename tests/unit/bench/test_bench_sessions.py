"""How runs of conversations become rows."""

from __future__ import annotations

from typing import Any

import pytest

from bench.sessions.run import errors_of, row_of
from services.cli.bench.records import Run
from services.cli.bench.workload import Workload


def test_a_run_without_a_request_says_what_to_do() -> None:
    """A second at a request a second may bring none."""
    workload = Workload(name="conversations", asks=())
    with pytest.raises(SystemExit, match="--seconds"):
        row_of(Run(workload), workload)


def test_predictions_are_held_against_what_was() -> None:
    """TTFT of all, the time computed only where the cache was as expected; what was not predicted
    counts for nothing."""

    def answered(ttft_s: float, prefill_s: float, cached: int, expected_s: float = 0.0) -> Any:
        predicted = {"prefill_s": expected_s} if expected_s else None
        receipt = {"ttft_s": ttft_s, "prefill_s": prefill_s, "cached_tokens": cached}
        receipt |= {"predicted_ttft_s": 1.0, "predicted_cached_tokens": 64}
        return {"receipt": receipt, "decisions": [{"prediction": predicted}]}

    found = errors_of(
        [
            answered(1.25, 0.5, 64, 0.4),
            answered(2.0, 1.0, 64, 1.1),
            answered(4.0, 9.0, 0, 0.1),
            answered(9.0, 9.0, 64),
        ]
    )
    assert found["ttft_error_p50"] == pytest.approx(0.5)
    assert found["service_mape"] == pytest.approx(0.15)
    assert (found["predicted"], found["service_predicted"]) == (3, 2)
