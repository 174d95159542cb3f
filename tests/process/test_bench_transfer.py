"""What bench/transfer measures against: ucx_perftest, as it is and with memory that was written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("libucx")

from bench.transfer.pairs import ucx_root, without_ucx, written_buffers

MESSAGE_MIB = 64


def resident_mib(environment: dict[str, str]) -> float:
    """Most memory that a perftest ever had which sends two messages to itself."""
    root = ucx_root()
    command = [
        str(root / "bin" / "ucx_perftest"), "-t", "tag_bw", "-l", "-s", str(MESSAGE_MIB << 20),
        "-n", "2", "-w", "2", "-f",
    ]  # fmt: skip
    library_path = {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_TLS": "self"}
    perftest = subprocess.Popen(
        command, env={**without_ucx(), **library_path, **environment}, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(perftest.pid, 0)
    perftest.returncode = os.waitstatus_to_exitcode(status)
    assert perftest.returncode == 0
    return usage.ru_maxrss / 1024


def test_written_buffers_are_memory_and_perftests_own_is_not(tmp_path: Path) -> None:
    """As it is, perftest sends pages that it never wrote; they are one page of zeros. With the
    library both buffers are there."""
    assert resident_mib({}) < 2 * MESSAGE_MIB  # the received message alone
    assert resident_mib(written_buffers(tmp_path)) > 2 * MESSAGE_MIB
