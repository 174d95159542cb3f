"""Equal steps of a simulated worker that are under way: one event stands for all of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

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
