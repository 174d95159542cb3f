"""What policies that compare seconds read of workers, as columns of numbers: looking at hundreds of
workers costs little more than looking at four.

A table's rows are written anew for those workers that have changed since somebody looked; a side
takes its own out of them, in its order. Pure; numpy is imported with this file, which is when such
a policy has a choice for the first time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.gateway.core.index.fetches import Hit
from services.gateway.core.index.holdings import Column, Holdings
from services.gateway.core.worker import Worker
from shared.ids import Incarnation

Mask = NDArray[np.bool_]

ROUNDING = 1e-6
"""Share by which what workers measure of equal steps differs."""

_NO_FIT = (np.nan,) * 3
_ONE_STEP = float(1 << 40)
"""Tokens of a step where its worker names no limit."""


class PromptColumns(NamedTuple):
    """Of each worker: when it is free, its fit of steps with prompts (not a number: seconds are not
    known), most tokens of a step, and prompt tokens that it has."""

    free_at: Column
    constant_s: Column
    token_s: Column
    attended_s: Column
    step_tokens: Column
    pending_tokens: Column

    def waits_s(self, now: float) -> Column:
        """Return seconds until a prompt that comes now would begin."""
        return np.maximum(self.free_at - now, 0.0)

    def compute_s(self, cached: Column | int, num_tokens: int) -> Column:
        """Return seconds for what is not cached of a prompt, as ``StepFit.prompt_seconds``."""
        num = num_tokens - cached
        each_s = self.token_s + self.attended_s * ((cached + (num_tokens + 1)) * 0.5)
        return np.ceil(num / self.step_tokens) * self.constant_s + each_s * num

    def guess(self, waits: Column, num_tokens: int) -> Mask | None:
        """See ``_guess``; who has no fit waits for the prompt tokens that it has, in full steps."""
        each_s = self.constant_s / self.step_tokens + self.token_s
        each_s += self.attended_s * (num_tokens * 0.5)
        unknown = _guess(each_s, self[1:5])
        if unknown is not None:
            waits[unknown] = (self.pending_tokens * each_s)[unknown]
        return unknown


class AnswerColumns(NamedTuple):
    """Of each worker: its fit of steps with answers alone (not a number: seconds are not known),
    and what it holds. num_answers: with one more."""

    constant_s: Column
    token_s: Column
    attended_s: Column
    num_answers: Column
    reserved_tokens: Column
    capacity_tokens: Column
    reserved_share: Column

    def step_s(self, num_tokens: int) -> tuple[Column, Mask]:
        """Return seconds of a step with one more answer, behind a prompt of so many tokens, and
        whether it does not fit."""
        context = self.reserved_tokens + num_tokens
        seconds = self.constant_s + self.token_s * self.num_answers
        seconds += self.attended_s * context
        return seconds, context >= self.capacity_tokens

    def guess(self, num_tokens: int) -> Mask | None:
        """See ``_guess``."""
        seconds = self.constant_s + self.token_s + self.attended_s * num_tokens
        return _guess(seconds, self[:3])


def _guess(seconds: Column, fit: Sequence[Column]) -> Mask | None:
    """Let who has no fit be as fast as the median of those that have one, by these seconds. Returns
    of each whether it has none; None = nobody has one."""
    unknown = np.isnan(seconds)
    if not (num_known := len(seconds) - np.count_nonzero(unknown)):
        return None
    middle = (num_known - 1) // 2
    median = seconds.argpartition(middle)[middle]  # what is no number comes last
    for column in (seconds, *fit):
        column[unknown] = column[median]
    return unknown


_NUM_PROMPTS = len(PromptColumns._fields)
_NUM_ROWS = _NUM_PROMPTS + len(AnswerColumns._fields)


class Columns:
    """Of all workers of a table, by their places."""

    def __init__(self) -> None:
        self.rows: Column = np.zeros((_NUM_ROWS, 16))

    def update(self, workers: Iterable[Worker]) -> None:
        """Write the rows of workers that are new or have changed."""
        for worker in workers:
            place, status = worker.place, worker.status
            while place >= self.rows.shape[1]:
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
            self.rows[:, place] = (
                worker.free_at,
                *(status.prompt_steps if worker.is_predictable else _NO_FIT)[:3],
                status.step_tokens or _ONE_STEP,
                worker.pending_tokens,
                *(status.answer_steps if worker.is_step_predictable else _NO_FIT)[:3],
                worker.num_answers + 1.0,
                worker.reserved_tokens,
                worker.capacity_tokens,
                worker.reserved_share,
            )


class Side:
    """Workers in their order, as columns; for as long as they are the same ones.

    table: the columns of the table that has them, as they are now.
    """

    def __init__(self, workers: Sequence[Worker], table: Callable[[], Columns]) -> None:
        self._places = np.array([worker.place for worker in workers])
        self._at = {worker.place: at for at, worker in enumerate(workers)}
        self._workers = [worker.incarnation for worker in workers]
        self._table = table
        self._slow: dict[Incarnation, tuple[Mapping[Incarnation, float], Column]] = {}

    def prompts(self) -> PromptColumns:
        """Return what prompts wait for, and take."""
        return PromptColumns(*self._table().rows[:_NUM_PROMPTS].take(self._places, axis=1))

    def answers(self) -> AnswerColumns:
        """Return what answers take."""
        return AnswerColumns(*self._table().rows[_NUM_PROMPTS:].take(self._places, axis=1))

    def shares(self) -> array[float]:
        """Return the shares of blocks that are taken."""
        return self.numbers(self._table().rows[-1].take(self._places))

    def cached(self, hits: Mapping[int, Hit], most: int) -> Column:
        """Return how many tokens of a prompt each has, or so many if it has more."""
        return np.minimum(Holdings.of(hits).tokens.take(self._places, mode="clip"), most)

    def loading(self, hits: Mapping[int, Hit]) -> list[int]:
        """Return which of these have some of a prompt below their pools."""
        at = map(self._at.get, Holdings.of(hits).below())
        return [place for place in at if place is not None]

    def byte_s(self, source: Worker) -> Column:
        """Return seconds a byte from a worker to each of these, 0 where that is not known."""
        speeds, known = source.status.speeds, self._slow.get(source.incarnation)
        # Never changed in place: the same dict has the same speeds.
        if known is None or known[0] is not speeds:
            column = np.array([speeds.get(it, 0.0) for it in self._workers], np.float64)
            column[column > 0.0] **= -1.0
            known = self._slow[source.incarnation] = speeds, column
        return known[1]

    @staticmethod
    def are_known(column: Column) -> bool:
        """Whether there is a number for each."""
        return least(column) >= 0.0

    @staticmethod
    def numbers(column: Column) -> array[float]:
        """Return plain numbers, to be read one by one."""
        return array("d", column.tobytes())

    @staticmethod
    def lowest(bounds: Column, scores: Column, most: int) -> list[int]:
        """Return the places of the few lowest bounds below the least score."""
        places = (bounds < least(scores) * (1.0 - ROUNDING)).nonzero()[0]
        if len(places) > most:
            places = places[bounds[places].argsort(kind="stable")[:most]]
        return places.tolist()


def least(column: Column) -> float:
    """Return the least number; not a number if one of them is none. Quicker than ``min``."""
    return column.item(column.argmin())


def least_of(scores: array[float], equal: float) -> list[int]:
    """See ``turns.least``: of all places."""
    column = np.frombuffer(scores)
    return (column <= least(column) * (1.0 + equal)).nonzero()[0].tolist()
