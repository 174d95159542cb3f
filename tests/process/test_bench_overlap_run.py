"""bench/overlap pushes with a worker's own pusher, whose calls change: its smallest run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.house import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.ucx, pytest.mark.slow]


def test_the_smallest_run_ends_with_its_figures() -> None:
    """One prompt's KV, pushed layer by layer and after the last."""
    command = ["bench.overlap.run", "--quick", "--prefill", "256", "--share", "0.1"]
    run = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["layerwise"]["exposed_ms"]["median"] > 0
