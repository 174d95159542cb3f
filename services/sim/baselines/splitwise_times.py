"""Splitwise's performance model: curves through medians of measured runs (ISCA'24, section 5.2).

Both curves are piecewise linear over the tokens of a batch and go on straight beyond their ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Annotated, Final

import msgspec

from shared.errors import InvalidRequest

MIXED_FACTOR: Final = 1.1
"""Of a batch with prompts and decodes, over its prompt curve."""


class Curve:
    """A piecewise linear function through points. points: at least two different x."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        by_x: defaultdict[float, list[float]] = defaultdict(list)
        for x, y in points:
            by_x[x].append(y)
        if len(by_x) < 2:
            raise InvalidRequest("runs of one batch size tell no curve: is the file whole?")
        self._xs = sorted(by_x)
        self._ys = [median(by_x[x]) for x in self._xs]

    def at(self, x: float) -> float:
        """Return the value at x; beyond the ends on the last line."""
        idx = min(max(bisect_right(self._xs, x) - 1, 0), len(self._xs) - 2)
        x0, x1, y0, y1 = *self._xs[idx : idx + 2], *self._ys[idx : idx + 2]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


class MeasuredRun(msgspec.Struct, frozen=True):
    """One line of their file: a batch of equal prompts. Times in ms; token_ms: of one step."""

    model: str
    hardware: str
    tp: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="tensor_parallel")
    prompt_len: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="prompt_size")
    batch: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(name="batch_size")
    prompt_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] = msgspec.field(name="prompt_time")
    token_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] = msgspec.field(name="token_time")

    @property
    def batch_tokens(self) -> int:
        """What both curves are over."""
        return self.prompt_len * self.batch


class MachineTimes:
    """How long iterations of one machine take, in seconds; a TimeModel. source: whose runs."""

    def __init__(self, runs: Sequence[MeasuredRun], source: str = "") -> None:
        self.source = source
        self._prompt = Curve((run.batch_tokens, run.prompt_ms / 1000) for run in runs)
        self._token = Curve((run.batch_tokens, run.token_ms / 1000) for run in runs)

    def prompt_s(self, num_tokens: int) -> float:
        """Of prompts alone."""
        return self._prompt.at(num_tokens)

    def token_s(self, batch: int) -> float:
        """Of a decode step alone (their code looks the batch up among batch tokens)."""
        return self._token.at(batch)

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel. Their curves know tokens and sequences, not what these attend to."""
        return self.iteration_s(num_prompt, num_rows)

    def warnings(self) -> list[str]:
        return []

    def iteration_s(self, prompt_tokens: int, num_decodes: int) -> float:
        """Of any batch."""
        if not prompt_tokens:
            return self.token_s(num_decodes)
        if not num_decodes:
            return self.prompt_s(prompt_tokens)
        return MIXED_FACTOR * self.prompt_s(prompt_tokens + num_decodes)


def prediction_error(fitted: Sequence[MeasuredRun], held_out: Sequence[MeasuredRun]) -> float:
    """Return the mean absolute relative error of both curves on runs that they have not seen."""
    times = MachineTimes(fitted)
    errors = [
        abs(predicted * 1000 - measured) / measured
        for run in held_out
        for predicted, measured in (
            (times.prompt_s(run.batch_tokens), run.prompt_ms),
            (times.token_s(run.batch_tokens), run.token_ms),
        )
    ]
    return sum(errors) / len(errors)
