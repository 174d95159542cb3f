"""A KV pool's memory is there before requests need it, and what was written meanwhile stays."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from shared.engine import huge_pages, resident
from shared.engine.fake import FakeEngine
from shared.engine.resident import LEAST_LEFT_BYTES, PIECE_BYTES, Resident, available_bytes
from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER

pytestmark = pytest.mark.torch

POOL_BYTES = 12 * PIECE_BYTES
WITHIN_S = 60.0


def num_resident(array: np.ndarray) -> int:
    """Bytes of an array that the system has given memory for, to the page."""
    begin = array.ctypes.data - array.ctypes.data % mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages)
    assert found == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> None:
    """Skip where the kernel maps nothing ahead."""
    probe = huge_pages.zeros(PIECE_BYTES)
    if not resident._map(probe.ctypes.data, probe.nbytes):
        pytest.skip("no MADV_POPULATE_WRITE here: Linux before 5.14, or another system")


def test_all_of_a_pool_becomes_resident() -> None:
    """To the last page; without the thread none of it is."""
    arrays = [huge_pages.zeros(POOL_BYTES) for _ in range(2)]
    assert sum(map(num_resident, arrays)) == 0
    thread = Resident(arrays)
    thread.start()
    until(lambda: sum(map(num_resident, arrays)) >= 2 * POOL_BYTES)
    thread.close()


def test_what_is_written_meanwhile_stays() -> None:
    """Ahead of the thread, behind it and where it works."""
    array = huge_pages.zeros(POOL_BYTES)
    thread = Resident([array])
    thread.start()
    wanted = np.random.default_rng(0).integers(0, 256, array.nbytes, dtype=np.uint8)
    for begin in np.random.default_rng(1).permutation(array.nbytes // 4096) * 4096:
        array[begin : begin + 4096] = wanted[begin : begin + 4096]
    until(lambda: num_resident(array) >= array.nbytes)
    thread.close()
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


def test_it_ends_at_once_when_the_engine_goes() -> None:
    """``close`` waits for one piece, not for the pool; before ``start`` it waits for nothing."""
    array = huge_pages.zeros(512 * PIECE_BYTES)
    thread = Resident([array])
    thread.start()
    until(lambda: num_resident(array[:PIECE_BYTES]) > 0)
    thread.close()
    assert num_resident(array) < array.nbytes
    assert not [one for one in threading.enumerate() if one.name == "pdmesh-resident"]
    Resident([array]).close()


def test_what_is_available_is_less_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the real machine; None where the system does not say."""
    found = available_bytes()
    assert found is not None
    total = next(
        1024 * int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 < found < total
    monkeypatch.setattr(resident, "Path", lambda _path: tmp_path)  # pyright: ignore[reportUnknownLambdaType]
    assert available_bytes() is None


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
