"""Equal steps of a simulated worker that are under way: one event stands for all of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

MOST_SKIPPED = 64
"""Steps that one event stands for at most: somebody nearly always comes sooner."""


@dataclass(slots=True)
class EqualSteps:
    """ends: of each. num_rows: the oldest running sequences; who comes now waits for its end.
    has_blocks: whether those of the step that runs are taken, and it is the last."""

    ends: list[float]
    began_at: float
    num_rows: int
    has_blocks: bool = False

    def num_done(self, now: float) -> int:
        """How many have ended, the last one never: an event ends it."""
        return min(bisect_right(self.ends, now), len(self.ends) - 1)
