"""One line of ``pdmesh doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text


class Verdict(Enum):
    """ABSENT: not here, and it does not matter."""

    RIGHT = "right"
    WRONG = "wrong"
    ABSENT = "absent"


_MARKS = {
    Verdict.RIGHT: ("✓", "green"),
    Verdict.WRONG: ("✗", "red"),
    Verdict.ABSENT: ("–", "dim"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """text: what is so. remedy: what to do, of a wrong one."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether somebody must do something."""
        return self.verdict is Verdict.WRONG

    def as_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "text": self.text,
            "remedy": self.remedy,
        }


def right(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, Verdict.RIGHT, text)


def wrong(name: str, text: str, remedy: str) -> Finding:
    """Something is to be done."""
    return Finding(name, Verdict.WRONG, text, remedy)


def absent(name: str, text: str) -> Finding:
    """Not here, and it does not matter."""
    return Finding(name, Verdict.ABSENT, text)


def lines_of(findings: Sequence[Finding], width: int) -> Text:
    """Return the lines of a list; a remedy stands below its finding. width: of the names."""
    text = Text()
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        text.append(f"{mark} ", style)
        text.append(f"{finding.name:<{width}}  ")
        text.append(f"{finding.text}\n", "dim" if finding.verdict is Verdict.ABSENT else "")
        if finding.remedy:
            text.append(f"{'':<{width + 4}}→ {finding.remedy}\n", "bold")
    return text
