"""How runs of the gateway's benchmark become a row: figures that all have, and ratios."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gateway.run import DIRECT, LOADS, OURS, Load, Runs, derived, row_of

PACED = next(load for load in LOADS if load.is_paced)


def a_run(cpu_s: float, answers: int) -> dict[str, Any]:
    """What the client tells of one window."""
    return derived(
        {"tokens": 1000, "events": 1000, "answers": answers, "cpu_s": cpu_s, "seconds": 1.0}
    )


def runs_of(load: Load, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Runs:
    """One load's repetitions."""
    return {(load.name, DIRECT): [], (load.name, OURS): ours, (load.name, "peer"): theirs}


def test_a_window_may_hold_no_answers_end() -> None:
    """Streams that are paced end every few seconds: what one repetition cannot tell is left out,
    the rest is told of all."""
    ours = [a_run(0.02, answers=3), a_run(0.04, answers=0)]
    row = row_of(PACED, [OURS, "peer"], runs_of(PACED, ours, [a_run(0.01, answers=3)] * 2))
    assert row["subjects"][OURS]["cpu_us_per_token"]["values"] == pytest.approx([20.0, 40.0])
    assert "answers_per_s" not in row["subjects"][OURS]
    assert "answers_per_s" in row["subjects"]["peer"]


def test_ratios_are_within_a_repetition() -> None:
    """Twice and four times a peer is three times in the median, whatever the machine did."""
    ours = [a_run(0.02, answers=1), a_run(0.40, answers=1)]
    theirs = [a_run(0.01, answers=1), a_run(0.10, answers=1)]
    row = row_of(PACED, [OURS, "peer"], runs_of(PACED, ours, theirs))
    ratio = row["ours_over_theirs"]["cpu_us_per_token"]["peer"]
    assert (ratio["median"], ratio["min"]) == (pytest.approx(3.0), pytest.approx(2.0))
