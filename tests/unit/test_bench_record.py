"""What a recorded run says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.record
from bench.record import Record, environment


def test_arguments_are_told_without_the_folders_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader can ask the same again; where a model lay is nobody's affair."""
    monkeypatch.setattr("sys.argv", ["run.py", "--tbt-ms", "10", "15", "--model", "/a/b/model"])
    assert environment()["arguments"] == ["--tbt-ms", "10", "15", "--model", "model"]


def test_a_second_run_of_a_day_and_commit_writes_over_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One load was asked after the other: both records are there."""
    monkeypatch.setattr(bench.record, "PROJECT", tmp_path)
    monkeypatch.delenv("PDMESH_BENCH_GOALS", raising=False)
    paths: list[Path] = []
    for load in ("one", "other", "third"):
        path = Record(tmp_path, is_quick=False, rows=[{"load": load}]).finish()
        assert path is not None
        paths.append(path)
    assert [json.loads(path.read_text())["rows"][0]["load"] for path in paths] == [
        "one", "other", "third",
    ]  # fmt: skip
    assert [path.stem.removeprefix(paths[0].stem) for path in paths] == ["", "-2", "-3"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == sorted(
        path.name for path in paths
    )
