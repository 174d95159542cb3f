"""Every question of ``bench/`` can be asked: its command line, and its smallest run to a record."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import QUESTIONS
from shared.model_folder import DEMO_FOLDER
from tests.support.fork_server import BENCH
from tests.support.house import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.ucx, pytest.mark.process, pytest.mark.slow]

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
COPY = f"shutil.copytree({str(DEMO_FOLDER)!r}, to, dirs_exist_ok=True)"
DEMO = f"import shutil; run.make_model = lambda to: {COPY}"
APART = f"""{DEMO}
main, asked = run.main, run.parse()
asked.rates, asked.seconds, asked.unloaded, asked.colocated = [2.0], 1.0, 1, asked.colocated[1:]
run.main = lambda: run.run_client(main(asked))"""
"""One run of two systems."""
SMALLEST = {
    "autoscaler": ("--parts step", "run.HOUR_S = 300.0"),
    "conductor": ("--parts order --requests 20", ""),
    "disaggregation": ("", f"{APART}\nasked.tolerance = 1.0"),
    "engine": ("--peers", f"run.model.SIZES |= {TINY}"),
    "faults": ("--kinds kill --roles decode --phases transfer --faults 1", ""),
    "gateway": ("--peers", "run.LOADS = run.LOADS[4:5]"),
    "grammar": ("--rows 1 --steps 1", f"run.SIZES |= {TINY}"),
    "handover": ("--engines fake --seconds 0.2 --priorities ordinary", "run.WARM_UP_ANSWERS = 2"),
    "limits": ("", APART),
    "loop_lag": (
        "--streams 1 --pauses 0 --seconds 0.5 --priorities ordinary --prefills 2",
        "run.WARM_UP_S = 0.1",
    ),
    "memory": ("--requests 40", "run.SETTLES_WITHIN_S = 0.0"),
    "pools": ("--parts rates --rates 1", ""),
    "router": ("--sizes 1", "run.LONG_SIZES, run.NUM_IDLE, run.NUM_TELLING = (4,), 2, 2"),
    "serve": (
        "",
        f"{DEMO}; run.INPUT, run.OUTPUT = 16, 4; import sys; sys.argv += ['--systems', run.OURS]",
    ),
    "sessions": (
        "--policies least_loaded --seconds 4",
        f"{DEMO}; run.NUM_PREFILL = run.NUM_DECODE = 1",
    ),
    "sessions/tiers": (
        "--models demo --tiers dram --tokens 320 --repetitions 1",
        "run.WARM_UP = 0",
    ),
    "simulator": ("--requests 5", "run.MESH = '1P+1D'"),
    "startup": (
        "--mib 16",
        "run.SETTLES_AFTER_S = 0.0\n"
        "run.in_fresh_process = lambda *what: run.seconds_to(*what[:2], run.Path(what[2]))",
    ),
    "transfer": ("--lanes tcp --sizes 65536 --batch-mib 1 --repetitions 1", ""),
}
"""A question's arguments beside --quick, and what else makes its run small; after a slash a program
beside its ``run.py``. Of the others the smallest takes minutes or a quiet machine, or has a test of
its own."""
LONGEST = ("disaggregation", "engine", "limits", "startup")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_command_line_is_read(
    question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what there is."""
    run = importlib.import_module(f"bench.{question}.run")
    monkeypatch.setattr(sys, "argv", ["run", "--help"])
    with pytest.raises(SystemExit) as ended:
        (getattr(run, "parse", None) or run.main)()
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize(
    "question",
    [pytest.param(it, marks=pytest.mark.nightly if it in LONGEST else ()) for it in SMALLEST],
)
def test_the_smallest_run_ends_with_a_record(question: str, tmp_path: Path) -> None:
    """With rows, in the folder that is asked for."""
    arguments, smaller = SMALLEST[question]
    folder, _, program = question.partition("/")
    program = f"bench.{folder}.{program or 'run'}"
    run = subprocess.run(
        [sys.executable, "-m", BENCH, program, smaller, "--quick", *arguments.split()],
        env={**os.environ, "PDMESH_BENCH_OUT": str(tmp_path)},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    (path,) = tmp_path.glob(f"{folder}-*.json")
    assert json.loads(path.read_text())["rows"]
