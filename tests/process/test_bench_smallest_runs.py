"""Every question of ``bench/`` can be asked: its command line, and its smallest run to an end."""

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
LOOPED = """
main, asked = run.main, run.parse()
run.main = lambda: run.run_client(main(asked))"""
SMALLEST = {
    "autoscaler": ("--parts step", "run.HOUR_S = 300.0"),
    "conductor": ("--parts order --requests 20", ""),
    "disaggregation": ("", f"{APART}\nasked.tolerance = 1.0"),
    "disaggregation/turns": ("", f"{DEMO}{LOOPED}"),
    "engine": ("--peers", f"run.model.SIZES |= {TINY}"),
    "faults": ("--kinds kill --roles decode --phases transfer --faults 1", ""),
    "gateway": ("--peers", "run.LOADS = run.LOADS[4:5]"),
    "grammar": ("--rows 2 --steps 1", f"run.SIZES |= {TINY}"),
    "handover": ("--engines fake --seconds 0.2 --priorities ordinary", "run.WARM_UP_ANSWERS = 2"),
    "limits": ("", APART),
    "loop_lag": (
        "--streams 1 --pauses 0 --seconds 0.5 --priorities ordinary --prefills 2",
        "run.WARM_UP_S = 0.1",
    ),
    "gpu/idle": ("--device cpu", "run.LENGTHS = run.LENGTHS[:2]"),
    "memory": ("--requests 40", "run.SETTLES_WITHIN_S = 0.0"),
    "overlap/engines": ("--lengths 64 --repetitions 1", DEMO),
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
    "simulator/choice": ("--meshes 1P+1D 2M --requests 3", "run.WORKLOADS.pop('talk')"),
    "simulator/peers": ("--requests 3", "run.MESH = '1P+1D'"),
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
PRINTED = {
    "disaggregation/gaps": ("--rates 2 --seconds 1", f"{DEMO}{LOOPED}", "token 1 to 2"),
    "disaggregation/steps": ("--repetitions 1 --steps 2", f"{DEMO}; run.ROWS = (1, 2)", "2 rows"),
    "handover/hops": ("--count 2", "", "unix, 30 ms apart: one way"),
    "handover/joins": ("--repetitions 2", "", "joins after it"),
    "limits/bound": (
        "--repetitions 1",
        f"{DEMO}; run.LENGTHS, run.NUM_REQUESTS = (16, 64), 100",
        "two servers, in order of arrival",
    ),
    "limits/machine": (
        "--repetitions 1",
        f"{DEMO}; run.ROWS, run.NUM_REQUESTS = (1, 2), 100",
        "together, one worker on all cores",
    ),
    "overlap/kv_share": (
        "--repetitions 1",
        f"run.model.SIZES |= {TINY} | {{'num_hidden_layers': 2}}; run.LENGTHS = (64,)",
        "64 tokens: KV written at",
    ),
}
"""The same of programs that print a table and write nothing; and what stands in it."""
LONGEST = (
    *("disaggregation", "disaggregation/turns", "engine", "limits"),
    *("overlap/engines", "simulator/choice", "startup"),
)


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
    ended = smallest_run(folder, program or "run", smaller, f"--quick {arguments}", tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (path,) = tmp_path.glob(f"{folder}-*.json")
    assert json.loads(path.read_text())["rows"]


@pytest.mark.nightly
@pytest.mark.parametrize("program", PRINTED)
def test_what_is_only_printed_is_there(program: str, tmp_path: Path) -> None:
    """And nothing is written."""
    arguments, smaller, words = PRINTED[program]
    ended = smallest_run(*program.split("/"), smaller, arguments, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert words in ended.stdout
    assert not [*tmp_path.iterdir()]


def smallest_run(
    folder: str, program: str, smaller: str, arguments: str, out: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program of ``bench/``, made smaller by code first."""
    return subprocess.run(
        [sys.executable, "-m", BENCH, f"bench.{folder}.{program}", smaller, *arguments.split()],
        env={**os.environ, "PDMESH_BENCH_OUT": str(out)},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
