"""The verbs that make environments, asked with a Python that cannot make one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.house import ROOT

# As Debian's without its packages for pip and venv, which begins a folder and then gives up.
BARE = """#!/bin/sh
case "$*" in
  -c*) exit {is_refused} ;;
  *--without-pip*) mkdir -p "$4/bin" && touch "$4/bin/python" ;;
  "-m venv"*) mkdir -p "$3/bin" && touch "$3/bin/python"; echo "apt install python3-venv"; exit 1 ;;
  *) echo "No module named pip" >&2; exit 1 ;;
esac
"""


def make(folder: Path, variable: str, *, is_refused: int) -> subprocess.CompletedProcess[str]:
    """Ask for an environment in a folder of the test's own."""
    python = folder / "python"
    python.write_text(BARE.format(is_refused=is_refused))
    python.chmod(0o755)
    wanted = folder / "environment"
    return subprocess.run(
        ["make", f"PYTHON={python}", f"{variable}={wanted}", f"{wanted}/bin/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("variable", ["VENV", "VLLM_VENV"])
def test_a_python_that_is_not_served_is_refused_first(tmp_path: Path, variable: str) -> None:
    """Before gigabytes are fetched for it."""
    told = make(tmp_path, variable, is_refused=1)
    assert told.returncode != 0
    assert "pdmesh needs Python 3.11 to 3.13" in told.stdout
    assert not (tmp_path / "environment").exists()


@pytest.mark.parametrize("variable", ["VENV", "VLLM_VENV"])
def test_what_could_not_be_made_is_not_left(tmp_path: Path, variable: str) -> None:
    """Else the next try would take it for an environment; Debian's advice is what is said."""
    told = make(tmp_path, variable, is_refused=0)
    assert told.returncode != 0
    assert "apt install python3-venv" in told.stdout
    assert "No module named pip" not in told.stderr
    assert not (tmp_path / "environment").exists()
