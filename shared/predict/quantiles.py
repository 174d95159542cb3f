"""Quantiles of the last values of something."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class RunningQuantiles:
    """The last ``size`` values, in order of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_age: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Take in a value; the oldest of ``size`` goes."""
        if len(self._by_age) == self._size:
            del self._sorted[bisect_left(self._sorted, self._by_age.popleft())]
        self._by_age.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """Return the smallest value that at least this share of all is not above; 0 of none."""
        if not self._sorted:
            return 0.0
        place = -int(-share * len(self._sorted) // 1) - 1  # rounded up
        return self._sorted[min(max(place, 0), len(self._sorted) - 1)]
