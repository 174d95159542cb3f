"""Take a KV pool's memory from the system before requests need it.

Host memory is mapped when it is first written, a huge page at a time, and a block that nobody has
used yet lies in one page of every layer's keys and values. So the first KV to arrive in a new block
would wait for tens of pages: 75 to 137 ms were measured on a virtual machine whose host maps lazily
too (24 pages, CPU), and every block is new until the pool has gone round. A thread maps the pool
beside whatever runs, blocks that are handed out first coming first. It writes nothing: a piece may
hold KV already.

Linux 5.14 and later; elsewhere memory is mapped as it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import structlog

from shared.control_groups import control_groups

PIECE_BYTES = 2 << 20
"""Mapped by one call: short, for it keeps mappings of other threads waiting."""

LEAST_LEFT_BYTES = 512 << 20
"""Of memory that is available, for others; below it mapping stops."""

LOOK_EVERY = 16
"""Pieces between two looks at what is available."""

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; no constant in Python's mmap

_MADVISE = ctypes.CDLL(None, use_errno=True).madvise

_log = structlog.get_logger(__name__)


class Resident:
    """A thread that maps arrays, from ``start`` until it is done or ``close``."""

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        *,
        available: Callable[[], int | None] = lambda: available_bytes(),
    ) -> None:
        """arrays: contiguous; kept alive. available: bytes that may still be taken, None = who
        knows."""
        self._arrays = arrays
        self._available = available
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="pdmesh-resident", daemon=True)

    def start(self) -> None:
        """Begin, if there is anything to map."""
        if self._arrays:
            self._thread.start()

    def close(self) -> None:
        """Stop after the current piece and wait for it: then the arrays may go."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._arrays = ()

    def _main(self) -> None:
        began_at = time.perf_counter()
        num_bytes = 0
        for idx, (address, size) in enumerate(_pieces(self._arrays)):
            left = self._available() if idx % LOOK_EVERY == 0 else None
            if left is not None and left < LEAST_LEFT_BYTES:
                _log.warning(
                    "memory is scarce: the rest of the KV pool is mapped as it is used",
                    num_bytes=num_bytes,
                )
                return
            piece_began_at = time.perf_counter()
            try:
                _map(address, size)
            except OSError as error:
                _log.info("the KV pool is mapped as it is used", reason=error.strerror)
                return
            num_bytes += size
            # As long a pause as a piece took: half of a core, and others' mappings have their turn.
            if self._is_over.wait(time.perf_counter() - piece_began_at):
                return
        took_s = round(time.perf_counter() - began_at, 3)
        _log.info("KV pool is resident", num_bytes=num_bytes, seconds=took_s)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process may still take: of the machine's memory, or of its control groups'
    if that is less. None: the system does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found.append(1024 * _fields(root / "proc/meminfo")["MemAvailable:"])
    for folder in control_groups("memory", root):
        # Version 2's names, then version 1's; without a limit the one says "max", the other a lot.
        for limit, usage, of_files in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = _fields(folder / "memory.stat")  # cached files give way
                files = stat[f"{of_files}active_file"] + stat[f"{of_files}inactive_file"]
                found.append(left + files)
    return min(found, default=None)


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _pieces(arrays: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes: the first piece of every array, the second of every array, and so on."""
    longest = max((array.nbytes for array in arrays), default=0)
    for offset in range(0, longest, PIECE_BYTES):
        for array in arrays:
            if offset < array.nbytes:
                yield array.ctypes.data + offset, min(PIECE_BYTES, array.nbytes - offset)


def _map(address: int, size: int) -> None:
    """Map the pages of a range, writable, as they are. Raises OSError: the kernel does not."""
    begin = address - address % mmap.PAGESIZE
    length = ctypes.c_size_t(address + size - begin)
    if _MADVISE(ctypes.c_void_p(begin), length, _MADV_POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
