"""What processes use of this machine's cores, and others that use them up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

QUIET_CORES = 0.1
"""Where others used more, a repetition says nothing about ours, and is tried again."""


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """User, nice and system time of all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, fields[1:4])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def other_work(count: int) -> Iterator[None]:
    """So many processes that compute all the while, as a neighbour on the machine does."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
