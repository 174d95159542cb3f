"""Steps that are run to be timed: chunks of one prompt, and batches of single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.request import SamplingParams
from shared.step import SampleSpec, StepRow

SMALLEST = 16
"""Tokens of the first chunk; each is twice the one before it."""

_SAMPLING = SamplingParams()


def chunks(engine: Engine, max_tokens: int, depths: Sequence[int]) -> Iterator[list[StepRow]]:
    """Chunks of one prompt, smallest first, each at every depth."""
    room = min(engine.spec.max_model_len - 1, engine.num_blocks * engine.block_size)
    size = SMALLEST
    while size <= min(max_tokens, room):
        for depth in depths:
            if depth + size <= room:
                yield [_row(engine, depth, size, first_block=0)]
        size *= 2


def batches(
    engine: Engine, max_rows: int, depths: Sequence[int], *, factor: int = 4
) -> Iterator[list[StepRow]]:
    """Single tokens of so many sequences, fewest first, each batch at every depth; every sequence
    has blocks of its own. factor: from one batch to the next."""
    num_rows = 1
    while num_rows <= max_rows:
        for depth in depths:
            blocks = -(-(depth + 1) // engine.block_size)
            fits = depth + 1 < engine.spec.max_model_len
            if fits and num_rows * blocks <= engine.num_blocks:
                yield [_row(engine, depth, 1, first_block=i * blocks) for i in range(num_rows)]
        num_rows *= factor


async def step_s(compute: ComputeRunner, rows: list[StepRow]) -> float:
    """Run a step and return what it took by the engine's own clock. Raises EngineFailed."""
    step = compute.begin(rows)
    await step.results()
    return step.seconds


def _row(engine: Engine, start: int, size: int, *, first_block: int) -> StepRow:
    num_blocks = -(-(start + size) // engine.block_size)
    token_ids = [1 % engine.spec.vocab_size] * size
    table = range(first_block, first_block + num_blocks)
    return StepRow(token_ids, start, table, SampleSpec(_SAMPLING, 0, (), ()))
