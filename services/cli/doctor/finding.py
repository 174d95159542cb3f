"""One line of ``pdmesh doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.text import Text

MARKS: Final = {"right": ("✓", "green"), "wrong": ("✗", "red"), "absent": ("–", "dim")}


@dataclass(frozen=True, slots=True)
class Finding:
    """text: what is so. remedy: what to do, of a wrong one. absent: not here, and it does not
    matter."""

    name: str
    verdict: Literal["right", "wrong", "absent"]
    text: str
    remedy: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.verdict == "wrong"


def right(name: str, text: str) -> Finding:
    return Finding(name, "right", text)


def wrong(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "wrong", text, remedy)


def absent(name: str, text: str) -> Finding:
    return Finding(name, "absent", text)


def lines_of(findings: Sequence[Finding], width: int) -> Text:
    """Return the lines of a list; a remedy stands below its finding. width: of the names."""
    text = Text()
    for finding in findings:
        mark, style = MARKS[finding.verdict]
        text.append(f"{mark} ", style).append(f"{finding.name:<{width}}  ")
        text.append(f"{finding.text}\n", "dim" if finding.verdict == "absent" else "")
        if finding.remedy:
            text.append(f"{'':<{width + 4}}→ {finding.remedy}\n", "bold")
    return text
