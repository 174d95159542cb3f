"""How runs of the gateway's benchmark become a row: figures that all have, and ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gateway.log_line import line_us
from bench.gateway.run import DIRECT, LOADS, OURS, Load, Runs, derived, judge, row_of
from bench.record import Record
from shared.log import configure_logs

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


def test_paced_streams_have_a_bar_of_their_own(tmp_path: Path) -> None:
    """A quarter beside the best router; flat out a tenth."""
    bounds: dict[bool, float] = {}
    for load in LOADS[1:3]:
        runs = runs_of(load, [a_run(0.02, answers=1)], [a_run(0.01, answers=1)])
        record = Record(tmp_path, is_quick=True)
        judge(record, load, row_of(load, [OURS, "peer"], runs))
        (goal,) = (it for it in record.goals if "best peer" in it.what)
        bounds[load.is_paced] = goal.bound
    assert bounds == {False: 1.1, True: 1.25}


def test_a_log_line_is_timed_by_itself(tmp_path: Path) -> None:
    """Every line is in the file in the end, each with its receipt."""
    try:
        assert all(0 < it < 10_000 for it in line_us(tmp_path / "log", 2))
    finally:
        configure_logs(service="test")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 300
    assert all('"prompt_tokens":512' in line and '"prefill_s":0.18' in line for line in lines)
