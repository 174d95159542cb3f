"""Pictures of the benchmarks: drawn from what is recorded, both formats, nothing lost."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import newest_goals, results
from bench.plots import Bars, Panel, save
from bench.record import PROJECT, Goal, spread

pytest.importorskip("torch")
pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_pictures_are_drawn_in_both_formats_with_their_names(tmp_path: Path) -> None:
    """Lines and bars, each picture in files of its own, whose names tell them apart; drawn again
    they are the same bytes."""
    lines = {"ours": [(1, spread([1, 2, 3])), (4, spread([5]))], "theirs": [(1, spread([2, 2]))]}
    bars = {"p50": {"a": spread([1]), "b": spread([2, 4])}, "p99": {"b": spread([9])}}
    pictures = {
        "": [Panel("a lane", "MiB", "GB/s", lines), Bars("b", "ms", bars, goal=2)],
        "-more": [Panel("c", "x", "y", lines, is_log=False, goal=3)],
    }
    save(pictures, tmp_path / "run.json")
    names = ["run-more.png", "run-more.svg", "run.png", "run.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "run.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "run.svg").read_text()
    first = [(tmp_path / name).read_bytes() for name in names]
    save(pictures, tmp_path / "run.json")
    assert [(tmp_path / name).read_bytes() for name in names] == first


@pytest.mark.parametrize(
    "question",
    [
        "disaggregation",
        "engine",
        "gateway",
        "handover",
        "limits",
        "loop_lag",
        "overlap",
        "transfer",
    ],
)
def test_recorded_runs_have_their_pictures(question: str) -> None:
    """Each question's results can be drawn, and have been; ``bench.engine.over_vllm`` has none."""
    pictures_of = importlib.import_module(f"bench.{question}.run").pictures_of
    runs = results(PROJECT / "bench" / question)
    drawn = [(path, pictures_of(content["rows"])) for path, content in runs]
    assert any(pictures for _, pictures in drawn)
    for path, pictures in drawn:
        for name, panels in pictures.items():
            assert panels
            for ending in ("svg", "png"):
                assert path.with_name(f"{path.stem}{name}.{ending}").exists()


def test_a_goal_is_of_the_newest_run_that_asked_for_it(tmp_path: Path) -> None:
    """A run may ask for one load of two: the other's goals stay those of the run before."""

    def run(name: str, at: str, **values: float) -> None:
        goals = [asdict(Goal(9, what, value, ">=", 2.0)) for what, value in values.items()]
        about = {"at": at, "commit": name, "machine": "cpu2"}
        content = {"environment": about, "goals": [{**goal, "is_met": True} for goal in goals]}
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(content))

    (tmp_path / "results").mkdir()
    run("younger", "2026-02-01", one=3.0)
    run("older", "2026-01-01", one=1.0, other=1.5)
    told = [(it.goal.what, it.goal.value, it.run) for it in newest_goals(results(tmp_path))]
    assert told == [
        ("one", 3.0, "2026-02-01 younger cpu2"),
        ("other", 1.5, "2026-01-01 older cpu2"),
    ]


def test_a_goal_is_confirmed_by_another_day_of_the_same_machine() -> None:
    """That found the same of it; a second run of one day says nothing new."""

    def run(at: str, value: float, machine: str = "cpu2") -> tuple[Path, dict[str, Any]]:
        about = {"at": at, "commit": "c", "machine": machine}
        return Path(at), {"environment": about, "goals": [asdict(Goal(9, "x", value, ">=", 2.0))]}

    def found(*runs: tuple[Path, dict[str, Any]]) -> bool:
        (entry,) = newest_goals(list(runs))
        return entry.is_confirmed

    assert found(run("2026-01-01", 3.0), run("2026-01-02", 2.5))
    assert found(run("2026-01-01", 3.0), run("2026-01-02", 1.0), run("2026-01-02", 2.5))
    assert not found(run("2026-01-01", 1.0), run("2026-01-02", 2.5))
    assert not found(run("2026-01-02T01", 3.0), run("2026-01-02T02", 2.5))
    assert not found(run("2026-01-01", 3.0), run("2026-01-02", 2.5, machine="h200"))
