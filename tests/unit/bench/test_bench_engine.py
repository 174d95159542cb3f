"""What bench/engine names and what it runs beside."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from bench.cpu import other_work
from bench.engine.run import case_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("size", "instructions", "busy", "case"),
    [
        ("125m", "avx512-bf16", 0, ""),
        ("1.1b", "avx512-bf16", 0, "1.1b: "),
        ("125m", "amx", 1, "amx: beside 1 busy: "),
    ],
)
def test_goals_of_other_cases_have_other_names(
    size: str, instructions: str, busy: int, case: str
) -> None:
    """A record of one must not stand for another."""
    environment = {"size": size, "instructions": instructions, "busy": busy}
    assert case_of(SimpleNamespace(environment=environment)) == case  # type: ignore[arg-type]


def test_other_work_computes_until_it_is_ended() -> None:
    """As many processes as were asked for."""

    def children() -> list[str]:
        return Path("/proc/thread-self/children").read_text().split()

    before = children()
    with other_work(2):
        others = set(children()) - {*before}
        assert len(others) == 2
        deadline = time.monotonic() + 30
        while not all(ticks_of(pid) > 5 for pid in others):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert children() == before


def ticks_of(pid: str) -> int:
    """Return how long a process has computed, in ticks of the kernel's clock."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
