"""``pdmesh doctor`` with its real processes: what it measures, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.doctor import machine_checks as checks
from services.cli.doctor import report as doctor
from services.cli.doctor.finding import Verdict
from services.cli.doctor.link import measure_link
from shared.errors import TransferFailed
from shared.lanes import is_within_host

pytestmark = [pytest.mark.process, pytest.mark.ucx]

ROOT = Path(__file__).parents[2]


async def test_two_real_processes_are_measured() -> None:
    """On the lane that the environment asks for; a UCX that cannot start is told in words."""
    link = await measure_link({"UCX_TLS": "tcp,self"})
    assert is_within_host((await measure_link({"UCX_TLS": "^posix"})).lane)
    assert link.lane.startswith("tcp")
    assert link.gb_per_s > 0
    assert link.library
    with pytest.raises(TransferFailed, match="UCX"):
        await measure_link({"UCX_TLS": "nonsense"})


async def test_a_torch_that_cannot_be_loaded_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is missing, say."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so is missing')")
    monkeypatch.setattr(
        "services.cli.doctor.report.our_code", lambda: {"PYTHONPATH": str(tmp_path)}
    )
    later = asyncio.get_running_loop().time() + 60
    facts, error = await doctor._probe_torch(later)
    assert facts is None
    assert "OSError: libtorch.so is missing" in error
    assert checks.check_torch(facts, error).verdict is Verdict.WRONG


@pytest.mark.torch
def test_the_whole_command_says_something_of_everything() -> None:
    """As a user runs it; whether all is well depends on the machine."""
    run = subprocess.run(
        [sys.executable, "-m", "services.cli", "doctor"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == (1 if "✗" in run.stdout else 0), run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    for name in (
        "Python", "torch", "UCX", "shared memory", "TCP", "RDMA", "GPU", "CUDA IPC", "port 8000",
        "port 8001", "port 8200",
        "SysV limits", "/dev/shm", "locked memory", "open files", "uvloop",
    ):  # fmt: skip
        assert f" {name} " in run.stdout, name
    assert "lane sysv" in run.stdout
