"""``pdmesh doctor`` with its real processes: what they tell, and what it says when they cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.doctor import machine_checks as checks
from services.cli.doctor import report as doctor
from services.cli.doctor.finding import Finding
from shared.engine.native import build
from tests.support.house import ROOT

pytestmark = [pytest.mark.process, pytest.mark.ucx]


async def test_the_ucx_that_workers_would_load_is_found() -> None:
    """Its file, and what it can drive."""
    facts, error = await doctor._probe("ucxx", "shared.transport.probe")
    assert not error
    assert facts
    assert facts["library"].endswith("libuct.so")
    assert "cma" in facts["modules"]


async def test_a_torch_that_cannot_be_loaded_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is missing, say."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so is missing')")
    monkeypatch.setattr(
        "services.cli.doctor.report.our_code", lambda: {"PYTHONPATH": str(tmp_path)}
    )
    facts, error = await doctor._probe("torch", "shared.engine.probe")
    assert facts is None
    assert "OSError: libtorch.so is missing" in error
    assert checks.check_torch(facts, error).is_wrong


@pytest.mark.torch
@pytest.mark.slow
def test_what_a_cpu_would_compute_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker would find if it started now: by which instructions, and what keeps it from
    better ones."""
    from shared.engine.native import library
    from tests.support.native import needs_native, quick_compiler

    needs_native()
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def found() -> Finding:
        library._found.cache_clear()
        try:
            return checks.check_kernels({"native": library.available()._asdict()})
        finally:
            library._found.cache_clear()

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert found().is_wrong
    assert "g++" in found().remedy
    monkeypatch.setenv("CXX", "/bin/false")
    assert found().is_wrong
    assert "/bin/false failed" in found().text
    monkeypatch.setenv("CXX", quick_compiler(tmp_path))
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build.INSTRUCTIONS["avx2"]))
    assert found().verdict == "right"
    assert "bfloat16 by avx2, float32 by avx2" in found().text
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "HERE", tmp_path / "nothing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found().is_wrong
    assert "compiled at every start" in found().text
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
    assert found().verdict == "absent"
    assert "this CPU lacks avx2, fma" in found().text


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
        "pdmesh", "torch", "CPU kernels", "UCX", "RDMA", "GPU", "CUDA IPC", "port 8000",
        "port 8001", "port 8200", "SysV limits", "locked memory", "open files",
    ):  # fmt: skip
        assert f" {name} " in run.stdout, name
