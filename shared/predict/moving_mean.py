"""What something took lately: a mean in which the newest values count most."""

from __future__ import annotations


class MovingMean:
    """Exponential moving mean; the first value counts whole."""

    def __init__(self, weight: float = 0.1) -> None:
        self.value = 0.0
        self._weight = weight
        self._has_value = False

    def add(self, value: float) -> None:
        """Take a value in."""
        self.value += (value - self.value) * (self._weight if self._has_value else 1.0)
        self._has_value = True
