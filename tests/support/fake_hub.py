"""A model hub that gives a folder of this machine, or no answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


class FakeHub:
    """Stands for huggingface_hub until the test ends. asked: for which names and files."""

    def __init__(self, answer: Path | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[str]]] = []
        stands_for: Any = self
        monkeypatch.setitem(sys.modules, "huggingface_hub", stands_for)

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        """Return where the files are."""
        self.asked.append((name, allow_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)
