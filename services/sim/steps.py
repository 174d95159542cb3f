"""Steps of a simulated worker: equal ones of which one event stands for all, and the way of a step
through pipeline stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.sim.clock import EventClock
from shared.predict.times import TimeModel

LEAST_SKIPPED, MOST_SKIPPED = 8, 64
"""Steps that one event stands for at most: after somebody came amid them few, for a busy worker
takes three in a row; more each time that nobody did. The end of every one is worked out."""


@dataclass(slots=True)
class EqualSteps:
    """ends: of each. num_rows: the oldest running sequences; who comes now waits for its end.
    has_blocks: whether those of the first step are taken."""

    ends: list[float]
    began_at: float
    num_rows: int
    has_blocks: bool = False

    @classmethod
    def begin(
        cls, times: TimeModel, now: float, num_steps: int, num_rows: int, num_context: int
    ) -> EqualSteps:
        """Return so many: each row reads one token more in the next."""
        contexts = range(num_context, num_context + num_steps * num_rows, num_rows)
        takes = (times.step_s(0, 0, num_rows, num) for num in contexts)
        return cls(list(accumulate(takes, initial=now))[1:], now, num_rows)

    @property
    def is_last(self) -> bool:
        """Whether the step that runs is the last one, and all is done that came before it."""
        return self.has_blocks and len(self.ends) == 1

    def num_done(self, now: float) -> int:
        """How many have ended, the last one never: an event ends it."""
        return min(bisect_right(self.ends, now), len(self.ends) - 1)

    def step_ends_at(self, now: float) -> float:
        """When the step ends that runs; 0 = it is the last, and has an event of its own."""
        return 0.0 if self.is_last else self.ends[self.num_done(now)]


@dataclass(slots=True)
class Stages:
    """num: how many. out_at: when the newest step leaves the last of them."""

    clock: EventClock
    num: int
    out_at: float = 0.0

    def leave(self, seconds: float, say: Sequence[Callable[[], None]]) -> None:
        """A step has left the first stage, in which it was so long: say this when it leaves the
        last."""
        if self.num == 1:
            _all(say)
            return
        # It waits in front of a stage in which a longer step is.
        soonest_at = self.clock.now + (self.num - 1) * seconds
        self.out_at = max(self.out_at + seconds, soonest_at)
        self.clock.at(self.out_at, lambda: _all(say))


def _all(say: Sequence[Callable[[], None]]) -> None:
    for word in say:
        word()
