"""How long this worker's steps take: measured before it joins, then learned from every step.

Two kinds of steps are learned apart, those with prompts in them and those without: the same number
of tokens costs differently (``shared/predict/step_time.py``). Decides nothing: the budget of a step
and the way of KV ask it, and gateways are told what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import structlog

from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.predict.step_time import StepFit, StepTimeModel, attended
from shared.profile.step_rows import batches, chunks
from shared.schedule.plan import StepPlan
from shared.step import StepRow

_log = structlog.get_logger(__name__)

PROFILE_S = 0.3
"""No step of the profile is begun later than this: who waits for the first answer waits for it."""

DEPTH = 1024
"""Where in its sequence every second chunk or token of the profile begins, the others at 0. In a
short context, or a small pool, it is half of that: at 0 alone positions and tokens are one."""

LEAST_LARGEST = 64
"""Chunks grow until one takes longer than the target: steps beyond it are nobody's business. So
many tokens are tried whatever the target."""

LEAST_SHAPES = 3
"""So many shapes are tried however long they take: a line has three coefficients, and what one
shape does not tell apart counts as the step's constant."""

REPETITIONS = 3
"""The quickest of them counts: what disturbs a step only ever slows it. Beyond the limit of time
there is one."""


class ProfileRange(NamedTuple):
    """What a profile is to cover. max_tokens, max_rows: of a step with prompts, and of one without;
    0 = there are none. target_s: steps with prompts keep to it, and none larger than the first that
    does not is tried; 0 = nothing hangs on it. known: whole prompts that were measured earlier,
    tokens and seconds of each: then only what begins late in a prompt is tried."""

    max_tokens: int
    max_rows: int
    target_s: float = 0.0
    known: Sequence[tuple[int, float]] = ()


class StepTimes:
    """One worker's steps."""

    def __init__(self) -> None:
        self._prompts, self._answers = StepTimeModel(), StepTimeModel()

    def predict(self, num_tokens: int, num_attended: int) -> float:
        """Predict a step with prompts, in seconds; 0 = not known yet."""
        return self._prompts.predict(num_tokens, num_attended)

    def of(self, plan: StepPlan) -> float:
        """Predict a step that is planned; 0 = not known yet."""
        model = self._prompts if plan.num_prefill_tokens else self._answers
        return model.predict(plan.num_tokens, plan.num_attended)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take note of a step that was run."""
        model = self._prompts if plan.num_prefill_tokens else self._answers
        model.observe(plan.num_tokens, plan.num_attended, seconds)

    def fits(self) -> tuple[StepFit, StepFit]:
        """Return what is known of steps with prompts, and of those without."""
        return self._prompts.fit(), self._answers.fit()

    async def profile(
        self,
        engine: Engine,
        compute: ComputeRunner,
        stopwatch: Callable[[], float],
        wanted: ProfileRange,
        *,
        limit_s: float = PROFILE_S,
    ) -> None:
        """Run steps of growing size, for ``limit_s`` or a little longer; for longer where a target
        hangs on them.

        They write into blocks of the pool: nobody may hold any yet.
        Raises EngineFailed: the device failed.
        """
        began_at = stopwatch()
        room = min(engine.spec.max_model_len, engine.num_blocks * engine.block_size)
        depths = (0, min(DEPTH, room // 2))
        prompts = chunks(engine, wanted.max_tokens, depths[bool(wanted.known) :])
        answers = batches(engine, wanted.max_rows, depths)
        for num_tokens, seconds in wanted.known:
            self._prompts.observe(num_tokens, attended(0, num_tokens), seconds)
        if wanted.max_tokens:
            until = began_at + (limit_s / 2 if wanted.max_rows else limit_s)
            await self._try(self._prompts, prompts, compute, stopwatch, until, wanted.target_s)
        if wanted.max_rows:
            until = max(began_at + limit_s, stopwatch() + limit_s / 2)
            await self._try(self._answers, answers, compute, stopwatch, until)
        _log.info("steps profiled", seconds=round(stopwatch() - began_at, 3))

    @staticmethod
    async def _try(
        model: StepTimeModel,
        steps: Iterator[list[StepRow]],
        compute: ComputeRunner,
        stopwatch: Callable[[], float],
        until: float,
        target_s: float = 0.0,
    ) -> None:
        for number, rows in enumerate(steps):
            num_tokens = sum(len(row.token_ids) for row in rows)
            is_late = stopwatch() > until
            is_wanted = number < LEAST_SHAPES or (target_s and num_tokens <= LEAST_LARGEST)
            if is_late and not is_wanted:
                break
            num_attended = sum(attended(row.start, row.stop) for row in rows)
            seconds = await _quickest(compute, rows, stopwatch, 1 if is_late else REPETITIONS)
            for _ in range(REPETITIONS):
                model.observe(num_tokens, num_attended, seconds)
            if target_s and seconds > target_s and num_tokens >= LEAST_LARGEST:
                break
        model.profiled()


async def _quickest(
    compute: ComputeRunner, rows: list[StepRow], stopwatch: Callable[[], float], num: int
) -> float:
    seconds: list[float] = []
    for _ in range(num):
        began_at = stopwatch()
        await compute.begin(rows).results()
        seconds.append(stopwatch() - began_at)
    return min(seconds)
