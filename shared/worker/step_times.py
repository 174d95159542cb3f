"""How long a step of a colocated worker takes: measured once before it joins, then kept true.

The shape of the model (a constant, so much a token, so much a position that is attended to) comes
from a profile of the engine; what else this machine does meanwhile is one factor, learned from the
steps that computed prompts. Decides nothing: ``shared/schedule/budget.py`` asks it.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.engine.base import Engine
from shared.engine.step_time import StepTimeModel
from shared.engine.worker import ComputeRunner
from shared.schedule.budget import attended
from shared.schedule.plan import StepPlan
from shared.step import StepRow
from shared.telemetry.worker import MovingMean

_log = structlog.get_logger(__name__)

DEPTHS = (0, 1024)
"""Where in its prompt a chunk of the profile begins."""

SMALLEST, LEAST_LARGEST = 16, 64
"""Tokens of the first chunk; each is twice the one before it, until one takes longer than the
target: steps beyond it are nobody's business. So many are tried whatever the target."""

REPETITIONS = 3
"""The quickest of them counts: what disturbs a step only ever slows it."""

_SLOWEST = 4.0
"""Most that one step may claim to be slower than predicted: one that stood still says nothing."""


class StepTimes:
    """Predicts a step from its tokens and the positions they attend to. 0 until profiled."""

    def __init__(self) -> None:
        self._model = StepTimeModel()
        self._slowness = MovingMean()
        self._quickest_s = 0.0
        self._most_tokens = 0

    def predict(self, num_tokens: int, num_attended: int) -> float:
        """Return seconds, never less than the quickest step of the profile took."""
        seconds = max(self._quickest_s, self._model.predict(num_tokens, num_attended))
        return seconds * (self._slowness.value or 1.0)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take note of a step that was run. Only those with prompt chunks count, and none that is
        larger than all of the profile, as a whole prompt is while nobody decodes."""
        num_tokens = plan.num_decode_rows + plan.num_prefill_tokens
        if not plan.num_prefill_tokens or num_tokens > self._most_tokens:
            return
        num_attended = sum(attended(row.start, row.stop) for row in plan.rows)
        predicted_s = max(self._quickest_s, self._model.predict(num_tokens, num_attended))
        if predicted_s > 0:
            self._slowness.add(min(_SLOWEST, seconds / predicted_s))

    async def profile(
        self,
        engine: Engine,
        compute: ComputeRunner,
        stopwatch: Callable[[], float],
        *,
        target_s: float,
        max_tokens: int,
    ) -> None:
        """Run steps of growing size, up to ``max_tokens``, until they take longer than the target.

        They write into blocks of the pool: nobody may hold any yet.
        Raises EngineFailed: the device failed.
        """
        began_at = stopwatch()
        room = min(engine.spec.max_model_len - 1, engine.num_blocks * engine.block_size)
        for depth in DEPTHS:
            size = SMALLEST
            while size <= max_tokens and depth + size <= room:
                row = _row(engine, depth, size)
                seconds = await _quickest(compute, row, stopwatch)
                self._quickest_s = min(seconds, self._quickest_s or seconds)
                self._most_tokens = max(self._most_tokens, size)
                for _ in range(REPETITIONS):
                    self._model.observe(size, attended(depth, depth + size), seconds)
                if seconds > target_s and size >= LEAST_LARGEST:
                    break
                size *= 2
        _log.info("steps profiled", seconds=round(stopwatch() - began_at, 3))


def _row(engine: Engine, start: int, size: int) -> StepRow:
    num_blocks = -(-(start + size) // engine.block_size)
    token_ids = [1 % engine.spec.vocab_size] * size
    return StepRow(token_ids=token_ids, start=start, block_table=range(num_blocks))


async def _quickest(compute: ComputeRunner, row: StepRow, stopwatch: Callable[[], float]) -> float:
    seconds: list[float] = []
    for _ in range(REPETITIONS):
        began_at = stopwatch()
        await compute.step([row])
        seconds.append(stopwatch() - began_at)
    return min(seconds)
