"""Goodputs under pairs of limits, from answers that were kept."""

from __future__ import annotations

from typing import Any

import pytest

from bench.limits.bound import all_together, in_order, rate_of, seconds_of, shortest_first
from bench.limits.run import answers_of, goodput_of
from services.cli.bench.records import Ending, Record, Run
from services.cli.bench.workload import Ask, Workload

UNLOADED = {"one": {"ttft_s": 0.1, "tpot_s": 0.02}, "other": {"ttft_s": 0.2, "tpot_s": 0.01}}


def rows_of(*runs: tuple[int, float, list[Any]], slowness: float = 1.0) -> list[dict[str, Any]]:
    """Two repetitions, the second on a machine that is slower by ``slowness``."""
    slow = {
        name: {key: value * slowness for key, value in found.items()}
        for name, found in UNLOADED.items()
    }
    return [
        {"repetition": 0, "unloaded": UNLOADED},
        {"repetition": 1, "unloaded": slow},
        *(
            {"repetition": number, "system": "one", "rate": rate, "void": [], "answers": answers}
            for number, rate, answers in runs
        ),
        {"repetition": 0, "system": "other", "rate": 9.0, "void": [], "answers": [(0.1, 0.01)]},
    ]


def test_limits_are_multiples_of_the_best_of_both() -> None:
    """Twice 0.1 s and twice 0.01 s, though no system has both."""
    rows = rows_of((0, 1.0, [(0.2, 0.02)]), (0, 2.0, [(0.2, 0.021)]), (0, 3.0, [(0.21, 0.01)]))
    assert goodput_of(rows, "one", 2, 2) == 1.0
    assert goodput_of(rows, "one", 2, 2.2) == 2.0
    assert goodput_of(rows, "one", 2.2, 2.2) == 3.0
    assert goodput_of(rows, "other", 2, 2) == 9.0


def test_repetitions_count_together_each_with_limits_of_its_own() -> None:
    """Nine of ten in all, in whichever repetition the tenth was; slower limits there."""
    good, late = (0.2, 0.02), (0.4, 0.02)
    rows = rows_of((0, 1.0, [good] * 4), (1, 1.0, [good] * 5 + [late]))
    assert goodput_of(rows, "one", 2, 2) == 1.0
    assert goodput_of([*rows, {**rows[2], "answers": [late]}], "one", 2, 2) == 0.0
    rows = rows_of((0, 1.0, [good] * 4), (1, 1.0, [late] * 6), slowness=2.0)
    assert goodput_of(rows, "one", 2, 2) == 1.0


def test_runs_in_which_the_client_fell_behind_do_not_count() -> None:
    """What it was late for nobody missed."""
    rows = rows_of((0, 1.0, [(0.2, 0.02)]), (0, 2.0, [(9.0, 9.0)]))
    rows[3]["void"] = ["late"]
    assert goodput_of(rows, "one", 2, 2) == 1.0


def test_what_is_kept_of_a_request() -> None:
    """TTFT from when it was due, time per token; nothing of one that failed."""
    whole = Record(Ask(num_input=1, num_output=3), 0, due_at=1.0, sent_at=1.1)
    for at in (1.5, 1.7, 1.9):
        whole.add(at, 1)
    whole.end = Ending.COMPLETE
    failed = Record(Ask(num_input=1, num_output=3), 1, due_at=1.0, sent_at=1.0)
    failed.fail(Ending.FAILED, "gone")
    workload = Workload(name="a load", asks=(whole.ask, failed.ask))
    run = Run(workload=workload, records=[whole, failed])
    assert answers_of(run) == [(pytest.approx(0.5), pytest.approx(0.2)), None]


def test_what_has_no_whole_answer_missed() -> None:
    """A request that was refused keeps no limit."""
    assert goodput_of(rows_of((0, 1.0, [(0.1, 0.01)] * 8 + [None])), "one", 2, 2) == 0.0


PROMPTS = [(0.0, 1.0, 500), (0.1, 3.0, 1500), (0.2, 1.0, 500), (0.3, 1.0, 500)]
"""One that is computed at once, and three that wait meanwhile, the longest first."""


def test_queues_differ_in_who_waits_for_whom() -> None:
    """In order of arrival, the shortest first, all that fit in one step, with a second server."""
    assert in_order(1)(PROMPTS) == pytest.approx([1.0, 3.9, 4.8, 5.7])
    assert shortest_first(PROMPTS) == pytest.approx([1.0, 1.8, 2.7, 5.9])
    assert all_together(PROMPTS) == pytest.approx([1.0, 4.9, 4.8, 5.7])
    assert in_order(2)(PROMPTS) == pytest.approx([1.0, 3.0, 1.8, 2.7])


def test_the_best_rate_is_the_last_before_a_miss() -> None:
    """One prompt a second and server, none of which may wait."""

    def prompts_at(rate: float) -> list[tuple[float, float, int]]:
        return [(at / rate, 1.0, 1) for at in range(100)]

    assert rate_of(in_order(1), prompts_at, 1.0) == 1.0
    assert rate_of(in_order(2), prompts_at, 1.0) == 2.0


def test_prompts_between_those_that_were_timed_are_on_a_line() -> None:
    """Shorter ones cost what the shortest costs, longer ones in proportion to the longest."""
    timed = [(100, 1.0), (200, 3.0)]
    assert [seconds_of(size, timed) for size in (10, 100, 150, 200, 400)] == [1, 1, 2, 3, 6]
