"""How much prompt fits beside running answers, by number and by time."""

from __future__ import annotations

import pytest

from shared.schedule.budget import (
    LEAST_CHUNK,
    TILE,
    BatchBudget,
    TimeBudget,
    TokenBudget,
    attended,
)
from tests.support.cores import Worker, a_sequence

BASE_S, TOKEN_S, ATTENDED_S = 0.010, 0.001, 1e-5


def predicted(num_tokens: int, num_attended: int) -> float:
    """A worker whose steps are easy to add up."""
    return BASE_S + TOKEN_S * num_tokens + ATTENDED_S * num_attended


def test_a_line_of_times_is_followed_in_a_few_looks() -> None:
    """Reports ask for every prompt that waits: halves alone would be eleven looks at each."""
    looks = list[int]()

    def line(num_tokens: int, num_attended: int) -> float:
        looks.append(num_tokens)
        return 0.001 + 0.0001 * num_tokens

    budget = TimeBudget(line, 0.0506, 2048, is_expecting=lambda: False)
    assert budget.room(8, 800, 0) == 480
    assert len(looks) <= 4
    looks.clear()
    assert (budget.room(600, 800, 0), len(looks)) == (0, 1)


def a_budget(target_s: float, max_tokens: int = 2048) -> TimeBudget:
    return TimeBudget(predicted, target_s, max_tokens, is_expecting=lambda: False)


def test_attended_positions_are_counted_token_by_token() -> None:
    """Every token attends to all before it and to itself."""
    assert attended(3, 6) == 4 + 5 + 6
    assert attended(5, 5) == 0


@pytest.mark.parametrize("start", [0, 100, 1000])
@pytest.mark.parametrize("num_decodes", [0, 1, 40])
def test_a_chunk_is_the_largest_whose_step_is_in_time(num_decodes: int, start: int) -> None:
    """One tile more would be late; deeper in a prompt, and beside more answers, it is smaller."""
    budget, context = a_budget(0.150), num_decodes * 50
    room = budget.room(num_decodes, context, start)

    def step_s(chunk: int) -> float:
        return predicted(num_decodes + chunk, context + attended(start, start + chunk))

    assert step_s(room) <= 0.150 < step_s(room + TILE)
    assert room < TILE or room % TILE == 0


def test_no_room_is_zero_and_a_quick_worker_stops_at_the_bound() -> None:
    """Time decides below the bound on tokens, and the bound above."""
    assert a_budget(0.005).room(0, 0, 0) == 0
    assert a_budget(60.0, max_tokens=100).room(4, 100, 0) == 96
    assert a_budget(60.0, max_tokens=100).room(100, 100, 0) == 0
    assert TokenBudget(100).room(104, 100, 0) == -4


def test_a_long_prompt_runs_beside_answers_within_the_target() -> None:
    """Every step gives every running answer its token, and none is predicted to be late."""
    worker = Worker(num_blocks=256, budget=a_budget(0.070))
    answers = [a_sequence(4, max_tokens=30, ignore_eos=True) for _ in range(4)]
    for sequence in answers:
        worker.scheduler.add(sequence)
    while not all(sequence.is_decoding for sequence in answers):
        worker.step()
    worker.scheduler.add(long := a_sequence(200, max_tokens=2))
    num_steps = 0
    while long.num_output_tokens == 0:
        plan = worker.scheduler.plan()
        num_attended = sum(attended(row.start, row.stop) for row in plan.rows)
        assert predicted(plan.num_decode_rows + plan.num_prefill_tokens, num_attended) <= 0.070
        assert plan.num_decode_rows == len(answers)
        worker.scheduler.commit(plan, worker.engine.step(plan.rows))
        num_steps += 1
    assert num_steps > 4


def test_a_prompt_advances_however_late_the_steps_are() -> None:
    """The target cannot be kept: running answers do not wait, and the first prompt gets a tile."""
    worker = Worker(budget=a_budget(0.001))
    worker.scheduler.add(answer := a_sequence(4, max_tokens=2))
    worker.step()
    first, second = a_sequence(40, max_tokens=2), a_sequence(40, max_tokens=2)
    worker.scheduler.add(first)
    worker.scheduler.add(second)
    plan = worker.scheduler.plan()
    assert [len(row.token_ids) for row in plan.rows] == [1, LEAST_CHUNK]
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    worker.run()
    assert all(sequence.is_over for sequence in (answer, first, second))


@pytest.mark.parametrize(
    ("answers_s", "is_chosen", "chunk"),
    [
        (0.02085, False, 304),  # what the target leaves
        (0.03045, False, 304),  # as much time again, beyond the target
        (0.03045, True, 208),  # within it, as it was asked for
        (0.08005, False, 800),
        (0.08005, True, 800),  # the answers alone miss it
    ],
)
def test_prompts_are_not_starved_by_answers_that_take_long(
    answers_s: float, is_chosen: bool, chunk: int
) -> None:
    """A prompt gets as much time as they do, in one step for all prompts, unless that would break a
    target which somebody has chosen and they keep."""

    def line(num_tokens: int, num_attended: int) -> float:
        return answers_s - 0.0001 + 0.0001 * num_tokens

    budget = TimeBudget(line, 0.0513, 2048, is_expecting=lambda: False, is_chosen=is_chosen)
    worker = Worker(num_blocks=512, budget=budget)
    worker.scheduler.add(a_sequence(4, max_tokens=9, ignore_eos=True))
    worker.step()
    for _ in range(2):
        worker.scheduler.add(a_sequence(1000, max_tokens=2))
    plan = worker.scheduler.plan()
    assert [len(row.token_ids) for row in plan.rows] == [1, chunk]


def test_while_nobody_decodes_the_first_prompt_is_computed_as_a_whole() -> None:
    """There is nobody whose next token a long step delays. The next prompt does not ride along:
    the first one's token would wait for it; and from that token on steps are in time."""
    worker = Worker(num_blocks=256, budget=a_budget(0.070))
    first, second = a_sequence(200, max_tokens=9), a_sequence(200, max_tokens=2)
    worker.scheduler.add(first)
    worker.scheduler.add(second)
    plan = worker.scheduler.plan()
    assert [len(row.token_ids) for row in plan.rows] == [200]
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    plan = worker.scheduler.plan()
    assert plan.num_decode_rows == 1
    assert 0 < plan.num_prefill_tokens <= 50
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    worker.run()
    assert first.is_over
    assert second.is_over


def test_a_whole_prompt_is_bounded_by_the_tokens_of_a_step() -> None:
    """One that is longer takes several steps."""
    worker = Worker(num_blocks=256, budget=a_budget(0.070, max_tokens=128))
    worker.scheduler.add(a_sequence(300, max_tokens=2))
    assert [len(worker.scheduler.plan().rows[0].token_ids)] == [128]


def test_prompts_keep_to_the_target_while_an_answer_is_expected() -> None:
    """Its first token was made elsewhere, and it would wait for the end of a long step."""
    is_expecting = True
    budget = TimeBudget(predicted, 0.070, 2048, is_expecting=lambda: is_expecting)
    worker = Worker(num_blocks=256, budget=budget)
    worker.scheduler.add(a_sequence(300, max_tokens=2))
    plan = worker.scheduler.plan()
    assert plan.num_prefill_tokens <= 60
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    is_expecting = False
    assert worker.scheduler.plan().num_prefill_tokens == 300 - plan.num_prefill_tokens


def prefill_steps(budget: BatchBudget, *lengths: int) -> list[list[int]]:
    """Tokens of each prompt in each step, until all have their token."""
    worker = Worker(num_blocks=1024, cache_prefixes=False, budget=budget)
    for length in lengths:
        worker.scheduler.add_prefill(a_sequence(length, max_tokens=9))
    steps: list[list[int]] = []
    while not (plan := worker.scheduler.plan()).is_empty:
        steps.append([len(row.token_ids) for row in plan.rows])
        worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    return steps


def test_prompts_that_keep_the_device_busy_are_computed_one_after_the_other() -> None:
    """Together they would take as long, and the first one's token would wait for the last."""
    assert prefill_steps(BatchBudget(2048, 32), 200, 100, 40) == [[200], [100], [40]]


def test_short_prompts_share_a_step_until_the_device_is_busy() -> None:
    """Up to the bound in all, in order of arrival; a tile or more that is left goes to a part of
    the next."""
    assert prefill_steps(BatchBudget(2048, 32), 8, 8, 8, 8, 8) == [[8, 8, 8], [8, 8]]
    assert prefill_steps(BatchBudget(2048, 32), 8, 100, 8) == [[8, 24], [76], [8]]
    assert prefill_steps(BatchBudget(2048, 32), 20, 100) == [
        [20],
        [100],
    ]  # less than a tile is left


def test_a_prompt_alone_is_bounded_by_the_tokens_of_a_step() -> None:
    """A smaller bound on a step holds for shared ones, too."""
    assert prefill_steps(BatchBudget(64, 512), 100, 100) == [[64], [36, 28], [64], [8]]
