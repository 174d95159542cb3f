"""How often a stranger makes us write a line: once a minute, whatever they send."""

from __future__ import annotations

EVERY_S = 60.0


class Complaints:
    """Counts what would be logged. Pure: ``now`` is an argument, in seconds."""

    def __init__(self) -> None:
        self._told_at: float | None = None
        self._num_untold = 0

    def count(self, now: float) -> int | None:
        """Return None if nothing may be said now, else how many were not told since the last."""
        if self._told_at is not None and now - self._told_at < EVERY_S:
            self._num_untold += 1
            return None
        num_untold, self._told_at, self._num_untold = self._num_untold, now, 0
        return num_untold
