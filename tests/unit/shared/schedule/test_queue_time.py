"""How long a queue of prompts takes: the very steps that the scheduler plans for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.predict.step_time import attended
from shared.schedule.budget import BatchBudget, StepBudget, TimeBudget, TokenBudget
from shared.schedule.queue_time import MAX_STEPS, queue_left_s
from tests.support.cores import Worker, a_sequence


def predict(num_tokens: int, num_attended: int) -> float:
    """What steps take here."""
    return 0.01 + 0.001 * num_tokens + 1e-5 * num_attended


BUDGETS = {
    "tokens": TokenBudget(32),
    "batch": BatchBudget(64, 24),
    "time": TimeBudget(predict, 0.05, 64, is_expecting=lambda: False),
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@given(prompts=st.lists(st.integers(1, 90), max_size=8), num_answers=st.integers(0, 3))
def test_is_what_the_scheduler_then_does(
    budget: StepBudget, prompts: list[int], num_answers: int
) -> None:
    """Prompts of other workers' answers, planned step by step until none is left, beside answers
    that go on all the while: the seconds of these steps are what was predicted."""
    worker = Worker(num_blocks=400, budget=budget, cache_prefixes=False)
    answers = [a_sequence(4, max_tokens=400) for _ in range(num_answers)]
    for answer in answers:
        worker.scheduler.add(answer)
        while not answer.is_decoding:
            worker.step()
    for size in prompts:
        worker.scheduler.add_prefill(a_sequence(size, max_tokens=1))
    predicted_s = queue_left_s(worker.scheduler.unfinished, budget, predict, 0.0)
    real_s = 0.0
    while worker.scheduler.statistics().pending_tokens:
        plan = worker.scheduler.plan()
        real_s += predict(plan.num_tokens, plan.num_attended)
        worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    # Contexts of answers grow meanwhile, and the last chunks may need a step more.
    near = {"rel": 0.1, "abs": 0.06} if num_answers else {"rel": 1e-9}
    assert predicted_s == pytest.approx(real_s, **near)


def test_what_the_cache_has_is_not_waited_for() -> None:
    """A prompt that was computed before is expected to be found."""
    worker = Worker(num_blocks=400)
    prompt = tuple(range(1, 41))
    worker.scheduler.add(a_sequence(prompt, max_tokens=1))
    worker.run()
    worker.scheduler.add(a_sequence(prompt, max_tokens=1))
    left_s = queue_left_s(worker.scheduler.unfinished, TokenBudget(32), predict, 0.0)
    assert left_s == pytest.approx(predict(4, attended(36, 40)))


def test_a_very_long_queue_is_not_followed_to_its_end() -> None:
    """Beyond so many steps it is taken to go on as it did."""
    prompts = [a_sequence(32, max_tokens=1)] * (4 * MAX_STEPS)
    seconds = queue_left_s(prompts, TokenBudget(32), predict, 0.0)
    assert seconds == pytest.approx(len(prompts) * predict(32, attended(0, 32)), rel=0.01)


def test_nothing_waits_for_nothing() -> None:
    """No prompts, no seconds, however many answers run."""
    answer = a_sequence(4, max_tokens=400)
    answer.tokens.append(1)
    answer.num_computed_tokens = 4
    assert queue_left_s([answer] * 5, TokenBudget(32), predict, 0.0) == 0.0
