"""A paper's table with ours beside it: what `pdmesh plan paper NAME` prints and the tests read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One figure. theirs: as printed there ('' = they give none). decimals: of ours, printed.

    why: what differs from theirs, and the reason; '' = nothing.
    """

    what: str
    theirs: str
    ours: float
    decimals: int = 2
    unit: str = ""
    why: str = ""

    @property
    def ours_text(self) -> str:
        """Ours, rounded as it is printed."""
        return f"{self.ours:,.{self.decimals}f}{f' {self.unit}' if self.unit else ''}"


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Some figures of one kind. notes: what holds for all of them."""

    title: str
    rows: Sequence[PaperRow]
    notes: Sequence[str] = field(default=())
