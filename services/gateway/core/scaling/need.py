"""How many workers some traffic needs so that its limits are kept: closed forms.

Prompts are a queue with several servers: Erlang's C for the share that waits, an exponential tail
for how long, corrected for the spread of computing times (Allen and Cunneen's approximation, as in
Whitt, "The queueing network analyzer", 1983). Answers are counted by Little's law: so many at once,
each worker holding as many as its steps keep the limit for, with a root of slack for the ups and
downs of their number (Halfin and Whitt, 1981). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.gateway.core.scaling.traffic import Traffic
from shared.predict.step_time import StepFit

MOST_WORKERS = 1024

_SLACK = 1.0
"""Room for answers beyond their mean number, in roots of that."""


class Limits(NamedTuple):
    """What is to be kept: seconds, and the share of requests that keep them."""

    ttft_s: float
    tpot_s: float
    target: float = 0.95


def waiting_share(num_workers: int, work: float) -> float:
    """Return the share of arrivals that finds all workers busy (Erlang's C formula). work: seconds
    of work that arrive a second; 1 where that is too much for ever."""
    if work >= num_workers:
        return 1.0
    blocked = 1.0
    # Erlang's B by its recursion, which needs no factorials; C follows from it.
    for num in range(1, num_workers + 1):
        blocked = work * blocked / (num + work * blocked)
    busy = work / num_workers
    return blocked / (1.0 - busy * (1.0 - blocked))


class PromptLoad(NamedTuple):
    """Prompts at one rate. work: workers that would be busy all the time. spread: squared
    coefficient of variation of the computing times ``prompts_s``, with mean ``mean_s``."""

    work: float
    mean_s: float
    spread: float
    prompts_s: Sequence[float]

    @classmethod
    def of(cls, traffic: Traffic, rate: float) -> PromptLoad:
        """Return the load of traffic at another rate."""
        mean_s, square = traffic.prompt_s, traffic.prompt_s * traffic.prompt_s
        spread = max(0.0, traffic.prompt_square_s - square) / square if square else 0.0
        return cls(rate * mean_s, mean_s, spread, traffic.prompts_s)

    def late_share(self, num_workers: float, ttft_s: float) -> float:
        """Return which share of those prompts that could be in time would not. num_workers: the
        last may be a part of one."""
        able = [prompt_s for prompt_s in self.prompts_s if prompt_s <= ttft_s]
        if not able or not self.work:
            return 0.0
        if self.work >= num_workers:
            return 1.0
        # The formula is of whole workers: so many of them, as busy as the fraction would be.
        whole = max(1, math.floor(num_workers))
        share = waiting_share(whole, min(self.work * whole / num_workers, whole))
        # The tail of M/M/c, longer by the mean of two squared variations: of the arrivals, 1 where
        # they come by chance alone, and of the computing times.
        decay = 2.0 * (num_workers - self.work) / (self.mean_s * (1.0 + self.spread))
        late = sum(math.exp(-decay * (ttft_s - prompt_s)) for prompt_s in able)
        return share * late / len(able)

    def hopeless_share(self, ttft_s: float) -> float:
        """Return the share of prompts that would be late on an idle worker."""
        if not self.prompts_s:
            return 0.0
        return sum(prompt_s > ttft_s for prompt_s in self.prompts_s) / len(self.prompts_s)


class AnswerLoad(NamedTuple):
    """Answers at one rate. work: workers that would be full all the time. most: answers that one
    worker runs within its limit and its room. single_s: a step of one answer alone, which may be
    over the limit already; then it is the room alone that counts."""

    work: float
    most: float
    single_s: float

    @classmethod
    def of(
        cls, traffic: Traffic, rate: float, steps: StepFit, capacity_tokens: float, tpot_s: float
    ) -> AnswerLoad:
        """Return the load of traffic at another rate, on workers with such steps and so much room
        for KV. An answer reads, on average, its prompt and half of itself."""
        context = traffic.prompt_tokens + traffic.output_tokens / 2
        answer_s = steps.token_s + steps.attended_s * context
        single_s = steps.constant_s + answer_s
        most = max(1.0, capacity_tokens / max(1.0, traffic.prompt_tokens + traffic.output_tokens))
        if single_s <= tpot_s and answer_s > 0:
            most = min(most, max(1.0, (tpot_s - steps.constant_s) / answer_s))
        at_once = rate * traffic.output_tokens * (steps.constant_s + answer_s * most)
        return cls(at_once / most, most, single_s)

    @property
    def slack(self) -> float:
        """Workers beyond ``work`` for the ups and downs of the number of answers."""
        # The root of ``work * most`` answers, over ``most`` of each worker.
        return _SLACK * math.sqrt(self.work / self.most)


def prompt_workers(load: PromptLoad, limits: Limits, most_busy: float) -> int:
    """Return the least number of workers for prompts alone, at least 1. most_busy: share of their
    time that they compute."""
    return _least(load.work / most_busy, lambda num: _is_kept(load, num, limits))


def answer_workers(load: AnswerLoad, most_busy: float) -> int:
    """Return the least number of workers for answers alone, at least 1."""
    return _least(max(load.work / most_busy, load.work + load.slack), lambda num: True)


def both_workers(prompts: PromptLoad, answers: AnswerLoad, limits: Limits, most_busy: float) -> int:
    """Return the least number of workers that do both: answers take their part of each."""
    work = prompts.work + answers.work
    return _least(
        max(work / most_busy, work + answers.slack),
        lambda num: _is_kept(prompts, num - answers.work, limits),
    )


def _is_kept(load: PromptLoad, num_workers: float, limits: Limits) -> bool:
    return load.late_share(num_workers, limits.ttft_s) <= 1.0 - limits.target


def _least(at_least: float, is_enough: Callable[[int], bool]) -> int:
    # A whole number that rounding has lifted a little needs no worker more.
    num = max(1, math.ceil(at_least - 1e-9))
    while num < MOST_WORKERS and not is_enough(num):
        num += 1
    return min(num, MOST_WORKERS)
