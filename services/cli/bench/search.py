"""Goodput by bisection: which rate to try next, from what the rates before attained. Pure.

Doubles until a rate misses the target (or halves until one attains it), then bisects. A curve that
is not monotone cannot fool it into a rate above a miss: it only ever looks between the highest rate
that attained and the lowest above it that did not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.telemetry.definitions import goodput

LOWEST_RATE = 1e-3
MOST_RUNS = 16


@dataclass(slots=True)
class RateSearch:
    """One search.

    first: the rate to begin with, requests/s. tolerance: of the answer, as a share of it. lowest:
    no lower rate is tried; who attains at none has a goodput of 0.
    """

    first: float = 1.0
    target: float = 0.9
    tolerance: float = 0.1
    most_runs: int = MOST_RUNS
    lowest: float = LOWEST_RATE
    tried: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def next_rate(self) -> float | None:
        """Return the rate of the next run, None when there is no further one."""
        return self._wanted() if len(self.tried) < self.most_runs else None

    @property
    def is_conclusive(self) -> bool:
        """Whether the answer is as good as asked for, and not merely the last that was allowed."""
        return self._wanted() is None

    def _wanted(self) -> float | None:
        if not self.tried:
            return self.first
        best, worst = self.best, self.lowest_miss
        if worst is None:
            return 2 * best
        if best == 0:
            return worst / 2 if worst / 2 >= self.lowest else None
        return (best + worst) / 2 if worst - best > self.tolerance * best else None

    def add(self, rate: float, share: float) -> None:
        self.tried.append((rate, share))

    @property
    def best(self) -> float:
        """The answer so far: the highest rate that attains, all lower ones attaining too."""
        return goodput(self.tried, target=self.target)

    @property
    def lowest_miss(self) -> float | None:
        """The lowest rate that missed; None if none has."""
        return min((rate for rate, share in self.tried if share < self.target), default=None)
