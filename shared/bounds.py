"""What a setting may be: bounds of numbers, and words; beside the fields of ``config.py``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Between(NamedTuple):
    """What a number may be, both ends included."""

    low: float
    high: float = math.inf

    def why_wrong(self, value: Any) -> str:
        """Return the rule if a value breaks it, else ''."""
        text = f"{self.low}..{self.high}" if self.high < math.inf else f"at least {self.low}"
        return "" if self.low <= value <= self.high else f"must be {text}"


class AboveZero(NamedTuple):
    """What a number may be, 0 excluded."""

    high: float

    def why_wrong(self, value: Any) -> str:
        """See Between."""
        return "" if 0 < value <= self.high else f"must be above 0 and at most {self.high}"


class OneOf:
    """What a word may be."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def why_wrong(self, value: Any) -> str:
        """See Between."""
        *most, last = self.words
        return "" if value in self.words else f"must be {', '.join(most)} or {last}"
