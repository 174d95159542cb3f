"""How many cores a process is granted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.control_groups import granted_cores, num_cores


@pytest.mark.parametrize(
    ("groups", "files", "granted"),
    [
        ("", {}, 4),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "max 100000\n"}, 4),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "50000 100000\n"}, 0.5),
        (
            "0::/a.slice/b.service\n",
            {"a.slice/cpu.max": "150000 100000\n", "a.slice/b.service/cpu.max": "300000 100000\n"},
            1.5,
        ),
        ("0::/\n", {"cpu.max": "900000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "rubbish\n"}, 4),
        (
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_the_narrowest_limit_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    granted: float,
) -> None:
    """The cores that it may run on, a service's group or one above it, a container's of version
    1; threads are whole."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    write(tmp_path, {"proc/self/cgroup": groups})
    write(tmp_path / "sys/fs/cgroup", files)
    assert granted_cores(tmp_path) == granted
    assert num_cores(tmp_path) == max(1, int(granted))


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel says whose threads they are."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cores = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(tmp_path, {folder.format(number): f"{own}\n" for number, own in cores.items()})
    assert num_cores(tmp_path) == 2


def write(root: Path, files: dict[str, str]) -> None:
    """Make the files and their folders."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
