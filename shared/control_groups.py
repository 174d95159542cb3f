"""What Linux grants this process of its machine: cores, and where limits of its control groups are.

Containers, Kubernetes and systemd grant a part of a core's time by such groups, not by fewer cores.
Threads for cores that are not granted make a team wait for whom the kernel has stopped: with half a
core two threads computed a fourth of what one did (the demo model, CPU).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Where the limits of this process may be: its own groups, and all above them."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounted = root / "sys/fs/cgroup"
            if controller in controllers.split(","):
                mounted /= controller
            elif controllers:
                continue
            own = mounted / path.lstrip("/")
            yield from (one for one in (own, *own.parents) if one.is_relative_to(mounted))


def granted_cores(root: Path = ROOT) -> float:
    """Return how many cores' time this process may take: a part of one, perhaps."""
    return min((_num_allowed(root), *_quotas(root)))


def num_cores(root: Path = ROOT) -> int:
    """Return for how many threads that compute there are cores: whole ones, one at least."""
    return max(1, int(granted_cores(root)))


def _num_allowed(root: Path) -> int:
    """Cores that this process may run on. Two threads of one core count once: what computes finds
    its arithmetic taken by the other."""
    cores: set[str] = set()
    for number in os.sched_getaffinity(0):
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        with contextlib.suppress(OSError):
            cores.add(siblings.read_text())
            continue
        cores.add(str(number))
    return len(cores)


def _quotas(root: Path) -> Iterator[float]:
    for folder in control_groups("cpu", root):
        # Version 2's file, then version 1's; without a limit the one says "max", the other -1.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period
        with contextlib.suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                yield quota / int((folder / "cpu.cfs_period_us").read_text())
