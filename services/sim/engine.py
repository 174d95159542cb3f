"""What computes in a simulated worker: a time model that knows how long a step takes, not what
comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from shared.predict.fit_steps import StepSample, line_through
from shared.predict.step_time import MIN_STEPS, StepFit, attended
from shared.predict.times import TimeModel
from shared.step import RowResult, StepRow

PROMPT_SHAPES = [
    (size, attended(depth, depth + size), 0, 0)
    for size in (16, 64, 256, 1024, 2048)
    for depth in (0, 1024, 4096)
]
ANSWER_SHAPES = [
    (0, 0, rows, rows * (depth + 1)) for rows in (1, 4, 16, 64, 256) for depth in (0, 1024, 4096)
]
"""Steps that a worker measures before it joins, as ``TimeModel.step_s`` takes them."""


def _fit(times: TimeModel, shapes: Sequence[tuple[int, int, int, int]]) -> StepFit:
    """Return what a worker knows of such steps that has measured these."""
    samples = [
        StepSample(prompt + rows, attends + context, times.step_s(prompt, attends, rows, context))
        for prompt, attends, rows, context in shapes
    ]
    return StepFit(*line_through(samples), MIN_STEPS)


ANSWER_TOKEN: Final = 0
"""Every token of an answer. No prompt may have it: it would find its beginning in an answer, even
in one that has not been told its tokens yet."""


class TimedEngine:
    """Takes the time that a model says; no token matters, and KV is nothing but its length. An
    engine that computes says so with no ``times``, and has each method itself.

    spreads_layers: whether layers are ready one after the other while a step runs; else all at its
    end, from ``step``.
    """

    spreads_layers = True
    times: TimeModel | None = None

    def __init__(self, times: TimeModel) -> None:
        self.times = self._times = times
        asked = deepcopy(times)  # no step of the plan, which a model warns of if it goes too far
        self._fits = _fit(asked, PROMPT_SHAPES), _fit(asked, ANSWER_SHAPES)

    def fits(self) -> tuple[StepFit, StepFit]:
        """What its worker reports of its steps, with prompts and without."""
        return self._fits

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        """How long a step takes. A row of one token is a decode row."""
        prompt = attends = decodes = context = 0
        for row in rows:
            num, start = len(row.token_ids), row.start
            if num == 1:
                decodes += 1
                context += start + 1
            else:
                prompt += num
                attends += attended(start, start + num)
        return self._times.step_s(prompt, attends, decodes, context)

    def step(self, rows: Sequence[StepRow], on_layer: Callable[[int], None]) -> list[RowResult]:
        """Compute a step, at its end."""
        return [RowResult(-1 if row.sample is None else ANSWER_TOKEN) for row in rows]

    def read(self, blocks: Sequence[int], start: int, stop: int, layers: tuple[int, int]) -> object:
        """Return KV of tokens [start, stop) in layers [first, last)."""
        return None

    def write(
        self, blocks: Sequence[int], start: int, stop: int, layers: tuple[int, int], kv: object
    ) -> None:
        """Place what ``read`` gave on another worker."""


@dataclass(slots=True)
class DoneWork:
    """What a worker has done. busy_s: in steps; most_held: blocks, while a step runs."""

    busy_s: float = 0.0
    num_steps: int = 0
    most_held: int = 0

    def note(self, seconds: float, num_held: int, num_steps: int = 1) -> None:
        """Take in equal steps: seconds of all of them, blocks in the last of them (0 = noted
        already)."""
        self.busy_s += seconds
        self.num_steps += num_steps
        if num_held > self.most_held:
            self.most_held = num_held
