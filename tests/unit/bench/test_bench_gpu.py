"""bench/gpu's arithmetic: how far answers agree, and which samples become which share and goal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.apart import Agreement, agreement
from bench.gpu.idle import Gap, Span, busy_and_gaps, fills_from
from bench.gpu.run import SHAPE, Limits, Sample, report, set_goals
from bench.record import Record

ASKED = argparse.Namespace(context=1024, exact=False)
DECODE, PREFILL = "decode batch 1 at 1024", "prefill 4096"


def test_equal_answers_agree_in_all() -> None:
    """No first difference is told where there is none."""
    answers = [[1, 2, 3], [4, 5, 6]]
    assert agreement(answers, answers) == Agreement(1.0, 1.0, None, None)


def test_differences_are_counted_and_the_first_of_each_answer_found() -> None:
    """Tokens that agree again after a difference count; only answers that differ have a place."""
    wanted = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    answers = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 9, 3, 9], [9, 2, 3, 4]]
    found = agreement(answers, wanted)
    assert found == Agreement(
        share_tokens=12 / 16, share_answers=1 / 4, first_median=1, first_earliest=0
    )
    assert agreement(answers[:3], wanted[:3]).first_median == 2.0
    assert agreement(wanted, answers) == found


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([[1, 2]], [[1, 2, 3]]),
        ([[1, 2]], [[1, 2], [1, 2]]),
        ([], []),
    ],
)
def test_what_is_not_alike_is_not_compared(answers: list[list[int]], wanted: list[Any]) -> None:
    """A missing token or answer is an error and no difference; nothing agrees with nothing."""
    with pytest.raises(ValueError, match=r"argument 2|nothing to compare"):
        agreement(answers, wanted)


def a_record(*, peer_s: float = 4.0) -> Record:
    """Ours twice, on a device that slowed down by half in between; a peer once, when it was slow.

    A decode step reads 100 bytes, a prompt takes 1000 operations.
    """
    fast, slow = Limits(100.0, 1000.0), Limits(50.0, 500.0)
    took = {
        ("pdmesh", DECODE): [Sample(fast, 1.25), Sample(slow, 2.5)],
        ("pdmesh", PREFILL): [Sample(fast, 2.0), Sample(slow, 4.0)],
        ("peer", DECODE): [Sample(slow, peer_s)],
        ("peer", PREFILL): [Sample(slow, peer_s)],
    }
    record = Record(Path("gpu"), is_quick=True)
    report(record, took, {DECODE: 100}, 1000.0)
    return record


def test_shares_are_of_the_limits_right_before_each_sample() -> None:
    """A device that slows down takes its limits with it; peers keep their own."""
    rows = {(row["who"], row["what"]): row for row in a_record().rows if "who" in row}
    assert rows["pdmesh", DECODE]["share_of_bandwidth"]["values"] == [0.8, 0.8]
    assert rows["pdmesh", PREFILL]["share_of_product_rate"]["values"] == [0.5, 0.5]
    assert rows["peer", DECODE]["share_of_bandwidth"]["values"] == [0.5]
    assert rows["peer", PREFILL]["share_of_product_rate"]["values"] == [0.5]
    assert rows["peer", DECODE]["median_x_pdmesh"] == pytest.approx(4.0 / 1.875)


def test_goals_are_ours_at_batch_1_and_of_the_long_prompt() -> None:
    """By their rows; a model with fewer layers has goals of other names."""
    record = a_record(peer_s=0.1)
    set_goals(record, ASKED, SHAPE["num_hidden_layers"])
    goals = [(goal.row, goal.what, goal.value, goal.relation, goal.bound) for goal in record.goals]
    assert goals == [
        (1, f"{DECODE}: share of the bandwidth", 0.8, ">=", 0.85),
        (2, f"{PREFILL}: share of the product rate", 0.5, ">=", 0.65),
    ]
    whole = {goal.what for goal in record.goals}
    record.goals.clear()
    set_goals(record, ASKED, 4)
    assert len(record.goals) == 2
    assert not whole & {goal.what for goal in record.goals}


def test_what_was_not_measured_is_no_goal() -> None:
    """Other batches and other prompts have none."""
    record = a_record()
    record.rows = [row for row in record.rows if row["what"] not in (DECODE, PREFILL)]
    set_goals(record, ASKED, 4)
    assert record.goals == []


def test_gaps_are_where_nothing_at_all_runs() -> None:
    """Pieces that overlap leave none between them; gaps of one kind are added up, longest first."""
    spans = [
        Span(0, 10, "copy"),
        Span(12, 20, "product"),
        Span(2, 11, "copy"),
        Span(15, 18, "sum"),  # within the product
        Span(21, 31, "copy"),
        Span(33, 40, "product"),
    ]
    share, gaps = busy_and_gaps(spans)
    assert gaps == [Gap("copy", "product", 3, 2), Gap("product", "copy", 1, 1)]
    assert share == pytest.approx(1 - 4 / 40)
    with pytest.raises(ValueError, match="no work"):
        busy_and_gaps([])


def test_a_prompt_fills_the_device_from_where_its_rate_is_near_the_best() -> None:
    """The shortest such length, though a longer one may fall below again."""
    assert fills_from([(128, 50.0), (256, 89.0), (512, 91.0), (1024, 100.0), (2048, 85.0)]) == 512
