"""Goodputs under pairs of limits, from answers that were kept."""

from __future__ import annotations

from typing import Any

from bench.limits.run import goodput_of

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


def test_what_has_no_whole_answer_missed() -> None:
    """A request that was refused keeps no limit."""
    assert goodput_of(rows_of((0, 1.0, [(0.1, 0.01)] * 8 + [None])), "one", 2, 2) == 0.0
