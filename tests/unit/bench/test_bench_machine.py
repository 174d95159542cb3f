"""What is simulated of a machine's cores, in cases that are computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.limits.bound import STEP
from bench.limits.machine import (
    Answer,
    Costs,
    Request,
    apart,
    in_turn,
    rate_of,
    requests_of,
    together,
)
from services.cli.bench.workload import Ask, Workload

SLOW = Costs(prompts=[(100, 1.0), (200, 2.0)], steps=[(1, 0.1), (2, 0.2)])
QUICK = Costs(prompts=[(100, 0.5), (200, 1.0)], steps=[(1, 0.1), (2, 0.2)])


def rounded(answers: list[Answer]) -> list[tuple[float, float]]:
    """In the order of their first tokens' delays."""
    return sorted((round(ttft, 6), round(tpot, 6)) for ttft, tpot in answers)


def test_a_prompt_alone_takes_what_was_timed_and_its_answer_steps_of_one_row() -> None:
    """Apart or together; an answer of one token has no gap."""
    long, short = Request(3.0, 100, 5), Request(9.0, 200, 1)
    for answers in (
        apart([long, short], rested=SLOW, beside=SLOW),
        together([long, short], costs=SLOW, target_s=0.15),
        in_turn([long, short], num_workers=2, costs=SLOW, target_s=0.15),
    ):
        assert rounded(answers) == [(1.0, 0.1), (2.0, 0.0)]


def test_prompts_wait_for_each_other_apart_and_answers_do_not_wait_for_them() -> None:
    """The second is done at 2, 1.5 after it came; it joins amid steps of 0.1 s, which end at 2."""
    answers = apart([Request(0.0, 100, 21), Request(0.5, 100, 2)], rested=SLOW, beside=SLOW)
    # Ten steps alone, then one of two rows, then ten alone.
    assert rounded(answers) == [(1.0, pytest.approx(2.1 / 20)), (1.5, pytest.approx(0.2))]


def test_a_prompt_has_all_cores_only_while_nobody_decodes() -> None:
    """0.5 s of the first; of the second 0.3 of its work beside three steps, then 0.35 s alone."""
    answers = apart([Request(0.0, 100, 4), Request(0.5, 100, 1)], rested=QUICK, beside=SLOW)
    assert rounded(answers) == [(0.5, 0.1), (0.65, 0.0)]


def test_a_step_has_all_cores_only_while_no_prompt_is_there() -> None:
    """Four steps of 0.05 s; a prompt comes within the fourth, and two of 0.1 s are beside it."""
    rested = Costs(prompts=QUICK.prompts, steps=[(1, 0.05)])
    answers = apart([Request(0.0, 100, 7), Request(0.66, 100, 1)], rested=rested, beside=SLOW)
    assert rounded(answers)[0] == (0.5, round((4 * 0.05 + 2 * 0.1) / 6, 6))


def test_together_a_step_carries_as_much_of_a_prompt_as_its_target_leaves() -> None:
    """1/8 s a step of 1/8 s beside one row: 8 steps of 1/4 s for a prompt of 1 s."""
    costs = Costs(prompts=[(100, 1.0)], steps=[(1, 0.125)])
    requests = [Request(0.0, 100, 41), Request(1.0, 100, 1)]
    answers = together(requests, costs=costs, target_s=0.25)
    assert rounded(answers) == [(1.0, (8 * 0.25 + 32 * 0.125) / 40), (2.0, 0.0)]
    # A target that a step is beyond by itself leaves a tenth of the step.
    answers = together(requests, costs=costs, target_s=0.01)
    assert rounded(answers)[0] == (1.0, pytest.approx(0.125 * 1.1))


def test_the_best_rate_is_the_last_before_nine_of_ten_miss() -> None:
    """Ten answers, of which as many are late as the rate is high."""

    def requests_at(rate: float) -> list[Request]:
        return [Request(0.0, 100, 2)] * round(rate / STEP)

    def serve(requests: Sequence[Request]) -> list[Answer]:
        late = [Answer(0.1, 9.0)] * len(requests)
        return [*late, *[Answer(0.1, 0.1)] * (20 - len(late))]

    assert rate_of(serve, requests_at, Answer(0.1, 0.1)) == 2 * STEP


def test_what_an_earlier_prompt_began_with_is_cached() -> None:
    """Whole blocks from the first on; never the last token, which is what gives the answer."""
    asks = (
        Ask(num_input=30, num_output=5, due_s=0.0, block_ids=(1, 2, 3)),
        Ask(num_input=35, num_output=5, due_s=1.0, block_ids=(1, 2, 4)),
        Ask(num_input=30, num_output=5, due_s=2.0, block_ids=(5, 2, 3)),
        Ask(num_input=30, num_output=5, due_s=3.0, block_ids=(1, 2, 3)),
    )
    requests = requests_of(Workload(name="test", asks=asks, block_tokens=10))
    assert [request.num_cached for request in requests] == [0, 20, 0, 29]
    assert requests[1][:3] == (1.0, 35, 5)


def test_a_cached_part_costs_nothing() -> None:
    """Of 200 tokens, 100 of which are there, the second hundred is left to compute."""
    (answer,) = apart([Request(0.0, 200, 1, num_cached=100)], rested=SLOW, beside=SLOW)
    assert answer.ttft_s == pytest.approx(1.0)
