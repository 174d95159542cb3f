"""When a campaign of faults ends, and what it is asked."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.faults import run
from bench.faults.run import KINDS, Cell, Hit, campaign, words_of
from bench.record import Record


class Harmless:
    """Faults that take no time, on no mesh; the clock is told how late it is."""

    num_asked = 0
    is_late = False

    def __init__(self, *_: object) -> None:
        Harmless.num_asked = 0

    async def start(self) -> None: ...

    async def recompute(self) -> float:
        Harmless.num_asked += 1
        return 0.1

    async def hit(self, cell: Cell) -> Hit:
        Harmless.is_late = True
        return Hit(cell, 0.0, 0.2, 2)

    async def load(self, seconds: float) -> tuple[int, int]:
        return 8, 0


@pytest.mark.parametrize(("kinds", "num_turns"), [(("load",), 1), (("kill",), 1)])
async def test_a_campaign_asks_no_more_when_it_has_nothing_to_hit_or_no_time(
    kinds: tuple[str, ...], num_turns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the four that warm the mesh up, a request for each turn that was hit in."""

    @contextlib.asynccontextmanager
    async def no_mesh() -> AsyncIterator[Any]:
        yield argparse.Namespace(explained=contextlib.nullcontext)

    monkeypatch.setattr(run, "process_mesh", no_mesh)
    monkeypatch.setattr(run, "Faults", Harmless)
    monkeypatch.setattr(Harmless, "is_late", False)
    monkeypatch.setattr(run.time, "monotonic", lambda: 1e9 if Harmless.is_late else 0.0)
    asked = argparse.Namespace(
        kinds=kinds, roles=("decode",), phases=("decode",), faults=200, limit=60.0, load_s=1.0,
        seed=1, verbose=False,
    )  # fmt: skip
    await campaign(asked, Record(tmp_path, is_quick=True))
    assert Harmless.num_asked == 4 + num_turns


def test_a_kind_that_there_is_not_is_refused() -> None:
    """It would hit nothing, without a word."""
    assert words_of(KINDS, "kill,load") == ("kill", "load")
    with pytest.raises(argparse.ArgumentTypeError, match="'kil' is none of kill, stop"):
        words_of(KINDS, "kil")
