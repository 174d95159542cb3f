"""What bench/transfer measures against: ucx_perftest, as it is and with memory that was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libucx")

from bench.transfer.pairs import copying_pair, our_pair, ucx_root, without_ucx, written_buffers
from shared.transport.settings import UcxSettings

MESSAGE_MIB = 64


MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""A small process of its own: what a process had before it became another counts, too."""


def resident_mib(environment: dict[str, str]) -> float:
    """Most memory that a perftest ever had which sends two messages to itself."""
    root = ucx_root()
    command = [
        sys.executable, "-c", MEASURE,
        str(root / "bin" / "ucx_perftest"), "-t", "tag_bw", "-l", "-s", str(MESSAGE_MIB << 20),
        "-n", "2", "-w", "2", "-f",
    ]  # fmt: skip
    library_path = {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_TLS": "self"}
    done = subprocess.run(
        command,
        env={**without_ucx(), **library_path, **environment},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return int(done.stdout) / 1024


def test_written_buffers_are_memory_and_perftests_own_is_not(tmp_path: Path) -> None:
    """As it is, perftest sends pages that it never wrote; they are one page of zeros. With the
    library both buffers are there."""
    assert resident_mib({}) < 2 * MESSAGE_MIB  # the received message alone
    assert resident_mib(written_buffers(tmp_path)) > 2 * MESSAGE_MIB


def test_a_plain_copy_arrives_in_the_other_process() -> None:
    """The limit of device memory, on a CPU: the writer maps the receiver's tensor, whose own bytes
    are looked at afterwards."""
    pair = copying_pair("cpu", (-1, -1))
    try:
        assert pair.stream(1 << 20, 4)["gb_per_s"] > 0
        assert len(pair.one_by_one(1 << 20, 3)) == 3
    finally:
        pair.close()


@pytest.mark.ucx
@pytest.mark.parametrize(("lane", "how"), [("sysv", "windows"), ("tcp", "messages")])
def test_frames_as_the_mesh_moves_them_are_verified_and_placed(lane: str, how: str) -> None:
    """More than there is room for, so that each waits for its room to be free again; the
    receiver checks digests and its pool."""
    environment = without_ucx()
    UcxSettings(tls=f"{lane},self").apply_to(environment)
    pair = our_pair(environment, (-1, -1), f"{how} as served")
    try:
        assert pair.stream(1 << 20, 80)["gb_per_s"] > 0
        assert pair.stream(64 << 20, 5)["gb_per_s"] > 0
        assert len(pair.one_by_one(1 << 20, 3)) == 3
    finally:
        pair.close()
