"""How many workers some traffic needs: closed forms against their textbooks' numbers."""

from __future__ import annotations

import math

import pytest

from services.gateway.core.scaling.need import (
    AnswerLoad,
    Limits,
    PromptLoad,
    answer_workers,
    both_workers,
    prompt_workers,
    waiting_share,
)
from shared.predict.step_time import StepFit
from tests.support.scaling import ANSWERS, traffic

LIMITS = Limits(ttft_s=5.0, tpot_s=0.052)


@pytest.mark.parametrize(
    ("num_workers", "work", "share"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (10, 8.0, 0.4092), (5, 5.0, 1.0)],
)
def test_erlangs_formula_gives_its_table(num_workers: int, work: float, share: float) -> None:
    """The share that waits is Erlang's C, and everybody waits where there is too much work."""
    assert waiting_share(num_workers, work) == pytest.approx(share, abs=1e-4)


def test_a_single_queue_waits_as_an_m_m_1() -> None:
    """With exponential times the tail is exact: late = busy x exp(-(1 - busy) t / mean)."""
    load = PromptLoad(0.8, 1.0, 1.0, (0.0,))
    assert load.late_share(1, 5.0) == pytest.approx(0.8 * math.exp(-0.2 * 5.0))


def test_equal_times_wait_half_as_long_as_exponential_ones() -> None:
    """Allen and Cunneen: the tail falls twice as fast without any spread."""
    load = PromptLoad(0.8, 1.0, 0.0, (0.0,))
    assert load.late_share(1, 5.0) == pytest.approx(0.8 * math.exp(-0.4 * 5.0))


def test_a_tighter_limit_takes_more_workers() -> None:
    """The limit of the first token counts, not the load alone."""
    load = PromptLoad.of(traffic(4.0), 4.0)
    loose = prompt_workers(load, Limits(30.0, 1.0), 0.85)
    tight = prompt_workers(load, Limits(1.2, 1.0), 0.85)
    assert loose == 5  # 4 of 0.85
    assert tight > loose


def test_prompts_that_no_worker_computes_in_time_take_no_workers() -> None:
    """A limit that nobody can keep does not buy workers for ever."""
    load = PromptLoad.of(traffic(2.0, prompt_s=10.0), 2.0)
    assert load.hopeless_share(5.0) == 1.0
    assert prompt_workers(load, LIMITS, 0.85) == 24  # as the work alone needs


def test_answers_are_as_many_as_their_steps_keep_the_limit_for() -> None:
    """16 answers take 52 ms a step: by Little's law 10 requests/s of 100 tokens are 52 at once."""
    load = AnswerLoad.of(traffic(10.0), 10.0, ANSWERS, 1e9, 0.052)
    assert load.most == pytest.approx(16.0)
    assert load.work == pytest.approx(52 / 16)
    assert answer_workers(load, 0.85) == 4


def test_room_bounds_answers_too() -> None:
    """Where KV fills up first, that counts."""
    load = AnswerLoad.of(traffic(10.0), 10.0, ANSWERS, 4400.0, 0.052)
    assert load.most == pytest.approx(4.0)


def test_a_token_limit_that_one_answer_misses_takes_no_workers() -> None:
    """Then the room alone counts."""
    slow = StepFit(0.1, 2e-3, 0.0, 100)
    load = AnswerLoad.of(traffic(1.0), 1.0, slow, 1e6, 0.052)
    assert load.single_s > 0.052
    assert answer_workers(load, 0.85) == 1


def test_workers_that_do_both_need_the_sum() -> None:
    """Prompts have what answers leave."""
    asked = traffic(4.0)
    prompts = PromptLoad.of(asked, 4.0)
    answers = AnswerLoad.of(asked, 4.0, ANSWERS, 1e9, 0.052)
    assert both_workers(prompts, answers, LIMITS, 0.85) == 7  # (4 + 1.3) / 0.85


def test_nothing_to_do_takes_one_worker() -> None:
    """A role is never left empty."""
    load = PromptLoad.of(traffic(0.0), 0.0)
    assert prompt_workers(load, LIMITS, 0.85) == 1
