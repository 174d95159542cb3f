"""Pages of documentation as tests see them: fenced blocks, and what is said about running each.

A comment above a block, which no reader sees, says what a test does with it:

    <!-- run -->               it runs to its end and succeeds
    <!-- run: says TEXT -->    and its output contains TEXT
    <!-- run: stays -->        it starts a mesh, which the blocks after it use
    <!-- not run: WHY -->      it is not run
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:not )?run)(?:: (?P<detail>.*?))? -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
COMMANDS = ("", "sh", "bash", "python")
"""Languages of blocks that may hold commands; a drawing says ``text``."""


@dataclass(frozen=True)
class Block:
    """One fenced block. mark: 'run', 'not run' or ''. line: where it begins in the page."""

    language: str
    code: str
    mark: str
    detail: str
    line: int

    @property
    def needs_mark(self) -> bool:
        """Whether a reader might type it in."""
        is_drawing = any(char in self.code for char in "│┌└▶◀─→←")
        return self.language in COMMANDS and not is_drawing

    @property
    def commands(self) -> list[list[str]]:
        """What follows ``pdmesh`` in each line, without comments; empty where a line is anything
        but a call of ``pdmesh`` that needs no shell."""
        if self.language == "python" or re.search(r"[|&;<>$`\\]", re.sub("#.*", "", self.code)):
            return []
        lines = [shlex.split(line, comments=True) for line in self.code.splitlines()]
        return [line[1:] for line in lines] if all(line[:1] == ["pdmesh"] for line in lines) else []


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["language"],
            found["code"],
            found["mark"] or "",
            found["detail"] or "",
            text[: found.start("code")].count("\n"),
        )
        for found in _BLOCK.finditer(text)
    ]
