"""A KV pool's memory is there before requests need it, and what was written meanwhile stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from shared.engine.fake import FakeEngine
from shared.engine.memory import huge_pages, resident
from shared.engine.memory.resident import (
    LEAST_LEFT_BYTES,
    LOOK_EVERY,
    PIECE_BYTES,
    Resident,
    available_bytes,
)
from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER
from tests.support.memory import maps_ahead, num_resident

pytestmark = pytest.mark.torch

needs_the_kernel = pytest.mark.skipif(not maps_ahead(), reason="maps ahead since Linux 5.14")

POOL_BYTES = 12 * PIECE_BYTES
WITHIN_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@needs_the_kernel
def test_all_of_a_pool_becomes_resident() -> None:
    """To the last page; without the thread none of it is."""
    arrays = [huge_pages.zeros(POOL_BYTES) for _ in range(2)]
    assert sum(map(num_resident, arrays)) == 0
    thread = Resident(arrays, available=lambda: None)
    thread.start()
    until(lambda: sum(map(num_resident, arrays)) >= 2 * POOL_BYTES)
    thread.close()


@needs_the_kernel
def test_what_is_written_meanwhile_stays() -> None:
    """Ahead of the thread, behind it and where it works."""
    array = huge_pages.zeros(POOL_BYTES)
    pick = np.random.default_rng(0)
    wanted = pick.integers(0, 256, array.nbytes, dtype=np.uint8)
    places = [slice(begin, begin + 4096) for begin in pick.permutation(len(array) // 4096) * 4096]
    for place in places[::2]:  # in every piece, before the thread comes to it
        array[place] = wanted[place]
    thread = Resident([array], available=lambda: None)
    thread.start()
    for place in places[1::2]:
        array[place] = wanted[place]
    thread._thread.join(WITHIN_S)
    assert np.array_equal(array, wanted)


def test_blocks_that_are_handed_out_first_are_mapped_first() -> None:
    """The beginnings of all arrays, before the middle of any."""
    arrays = [np.zeros(2 * PIECE_BYTES + 10, np.uint8), np.zeros(PIECE_BYTES, np.uint8)]
    first, second = (array.ctypes.data for array in arrays)
    assert list(resident._pieces(arrays)) == [
        (first, PIECE_BYTES),
        (second, PIECE_BYTES),
        (first + PIECE_BYTES, PIECE_BYTES),
        (first + 2 * PIECE_BYTES, 10),
    ]


@needs_the_kernel
def test_scarce_memory_is_left_to_others() -> None:
    """It stops, says so once, and the pool serves as it is."""
    array = huge_pages.zeros(64 * PIECE_BYTES)
    left = iter([LEAST_LEFT_BYTES, LEAST_LEFT_BYTES, LEAST_LEFT_BYTES - 1])
    with capture_logs() as logged:
        thread = Resident([array], available=lambda: next(left))
        thread.start()
        until(lambda: any(line["log_level"] == "warning" for line in logged))
        thread.close()
    assert [line["num_bytes"] for line in logged] == [32 * PIECE_BYTES]
    assert num_resident(array) == 32 * PIECE_BYTES


@needs_the_kernel
def test_it_ends_at_once_when_the_engine_goes() -> None:
    """``close`` waits for one piece, not for the pool; before ``start`` it waits for nothing."""
    array = huge_pages.zeros(4 * LOOK_EVERY * PIECE_BYTES)
    looks: list[Resident] = []
    closing = threading.Event()

    def available() -> None:
        looks.append(thread)
        if len(looks) == 2:  # amid the pool, until somebody closes it
            assert closing.wait(WITHIN_S)
            until(thread._is_over.is_set)

    thread = Resident([array], available=available)
    thread.start()
    until(lambda: len(looks) == 2)
    closing.set()
    thread.close()
    assert num_resident(array) == (LOOK_EVERY + 1) * PIECE_BYTES
    assert not [one for one in threading.enumerate() if one.name == "pdmesh-resident"]
    Resident([array]).close()


def test_what_is_available_is_less_than_there_is() -> None:
    """Of the real machine."""
    found = available_bytes()
    if not Path("/proc/meminfo").exists():
        assert found is None
        return
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
    assert found is not None
    assert 0 < found < total


MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("", {}, None),
        ("", {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2048 kB\n"}, 2 * MIB),
        (
            "0::/a.slice/b.service\n",
            {
                "proc/meminfo": "MemAvailable: 9000 kB\n",
                "sys/fs/cgroup/memory.stat": "active_file 0\ninactive_file 0\n",
                "sys/fs/cgroup/a.slice/memory.max": "max\n",
                "sys/fs/cgroup/a.slice/b.service/memory.max": f"{5 * MIB}\n",
                "sys/fs/cgroup/a.slice/b.service/memory.current": f"{4 * MIB}\n",
                "sys/fs/cgroup/a.slice/b.service/memory.stat": (
                    f"file {4 * MIB}\nactive_file 100\ninactive_file 20\nshmem {4 * MIB}\n"
                ),
            },
            MIB + 120,
        ),
        (
            # A container sees its own group at the root, whatever the path says.
            "3:cpu:/x\n2:memory:/docker/abc\n",
            {
                "proc/meminfo": "MemAvailable: 9000 kB\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * MIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{MIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_active_file 7\ntotal_inactive_file 0\n",
            },
            2 * MIB + 7,
        ),
    ],
)
def test_the_narrowest_limit_is_what_is_available(
    tmp_path: Path, groups: str, files: dict[str, str], left: int | None
) -> None:
    """The machine's memory, a service's group, a container's of version 1; what is cached of files
    counts as available, shared memory does not."""
    for name, text in {**files, "proc/self/cgroup": groups}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == left


def test_engines_name_all_of_their_pool() -> None:
    """As many bytes as the layout says, and the very memory that a scatter fills."""
    engines = [
        FakeEngine(num_blocks=8),
        TorchEngine.load(DEMO_FOLDER, num_blocks=8, kernels="torch"),
        TorchEngine.load(DEMO_FOLDER, num_blocks=8),
    ]
    for engine in engines:
        arrays = engine.pool_arrays()
        layout, size = engine.layout, engine.block_size
        assert sum(array.nbytes for array in arrays) == 8 * size * layout.token_bytes
        frame = engine.new_buffer(size * layout.token_bytes)
        frame[:] = 7
        engine.scatter([3], 0, size, 0, layout.num_layers, frame)
        num_filled = sum(int((array.view(np.uint8) == 7).sum()) for array in arrays)
        assert num_filled == size * layout.token_bytes
        engine.close()


def test_more_than_there_is() -> None:
    """It is an error of memory, as torch's own allocations have it, which engines turn into
    EngineFailed."""
    with pytest.raises(MemoryError, match="host memory"):
        huge_pages.zeros(1 << 60)
