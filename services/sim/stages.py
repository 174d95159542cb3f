"""Pipeline stages of a simulated worker for prompts alone: the next step begins when the first
stage is free, and what a step says comes when it has left the last.

As in DistServe's simulator a stage takes its part of the step, one step after the other. No engine
of ours has stages: this is for plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.sim.clock import EventClock


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
