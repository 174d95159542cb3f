"""Times steps of all sizes with the worker's own engine, for a profile that planners read.

    prompts   chunks of 16, 32, 64, ... tokens, each at several depths of its sequence
    answers   1, 2, 4, ... sequences, each at several lengths

Nobody may hold blocks of the pool yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import EngineFailed, InvalidRequest
from shared.predict.fit_steps import FittedPhase, StepSample, fit_steps
from shared.predict.step_time import attended
from shared.profile.step_profile import MOST_ERROR, StepProfile
from shared.profile.step_rows import batches, chunks, step_s
from shared.step import StepRow
from shared.version import VERSION

DEPTHS = (0, 256, 1024, 4096, 8192)
"""Tokens that stand before a chunk, or before the token of a sequence that decodes."""

MOST_TOKENS, MOST_ROWS = 8192, 256

REPETITIONS = 3
"""The quickest of them counts: what disturbs a step only ever slows it."""


async def measure_steps(
    engine: Engine, compute: ComputeRunner, stopwatch: Callable[[], float], *, limit_s: float
) -> tuple[list[StepSample], list[StepSample]]:
    """Return steps with prompts, and steps without; each kind gets half of the time.

    A size whose step took longer than a twentieth of that is the last. Raises EngineFailed.
    """
    prompts = chunks(engine, MOST_TOKENS, DEPTHS)
    answers = batches(engine, MOST_ROWS, DEPTHS, factor=2)
    return (
        await _time(prompts, compute, stopwatch, limit_s / 2),
        await _time(answers, compute, stopwatch, limit_s / 2),
    )


async def _time(
    steps: Iterator[list[StepRow]],
    compute: ComputeRunner,
    stopwatch: Callable[[], float],
    limit_s: float,
) -> list[StepSample]:
    found: list[StepSample] = []
    ends_at = stopwatch() + limit_s
    for rows in steps:
        if found and stopwatch() + REPETITIONS * found[-1].seconds > ends_at:
            break
        # Kernels are compiled at their first use, and caches filled.
        await compute.begin(rows).results()
        seconds = [await step_s(compute, rows) for _ in range(REPETITIONS)]
        num_tokens = sum(len(row.token_ids) for row in rows)
        num_attended = sum(attended(row.start, row.stop) for row in rows)
        found.append(StepSample(num_tokens, num_attended, min(seconds)))
    return found


def fitted_profile(
    steps: tuple[Sequence[StepSample], Sequence[StepSample]], engine: Engine, *, date: str
) -> StepProfile:
    """Return the lines through measured steps, with what they are of.

    Raises InvalidRequest: too few steps. EngineFailed: a line that misses those held out by more
    than ``MOST_ERROR`` in the mean.
    """
    phases: list[FittedPhase] = []
    for name, samples in zip(("with prompts", "without prompts"), steps, strict=True):
        try:
            fit = fit_steps(samples)
        except ValueError as error:
            raise InvalidRequest(
                f"no profile: of steps {name} {error}; give --measure or --num-blocks more"
            ) from None
        if fit.error > MOST_ERROR:
            raise EngineFailed(
                f"no profile: steps {name} follow no line ({fit.error:.0%} mean error of those "
                f"that were not fitted, {MOST_ERROR:.0%} is the most). Is the machine busy?"
            )
        phases.append(fit)
    spec = engine.spec
    return StepProfile(
        version=VERSION,
        date=date,
        machine={name: str(word) for name, word in engine.machine.items()},
        model=spec.name,
        fingerprint=spec.fingerprint.hex(),
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        token_bytes=engine.layout.token_bytes,
        kv_tokens=engine.num_blocks * engine.block_size,
        prompts=phases[0],
        answers=phases[1],
    )
