"""Pictures of the benchmarks: drawn from what is recorded, both formats, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plots import Panel, save
from bench.record import PROJECT, spread

pytest.importorskip("matplotlib")


def test_panels_are_drawn_in_both_formats_with_their_names(tmp_path: Path) -> None:
    """Every line and title is in the picture; a range is drawn around each median."""
    lines = {"ours": [(1, spread([1, 2, 3])), (4, spread([5]))], "theirs": [(1, spread([2, 2]))]}
    save([Panel("a lane", "MiB", "GB/s", lines), Panel("b", "x", "y", lines)], tmp_path / "run")
    assert (tmp_path / "run.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize("question", ["engine", "transfer", "overlap"])
def test_recorded_runs_have_their_pictures(question: str) -> None:
    """Newest results can be drawn: a picture stands beside each file of them."""
    for path in (PROJECT / "bench" / question / "results").glob("*.json"):
        assert json.loads(path.read_text())["rows"]
        assert path.with_suffix(".svg").exists()
        assert path.with_suffix(".png").exists()
