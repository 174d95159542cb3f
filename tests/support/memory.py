"""What the system has given memory for."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys

import numpy as np


def maps_ahead() -> bool:
    """Whether this kernel is one that maps memory before it is written (Linux 5.14)."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return sys.platform == "linux" and version is not None and _numbers(version) >= (5, 14)


def _numbers(version: re.Match[str]) -> tuple[int, int]:
    return int(version[1]), int(version[2])


def num_resident(array: np.ndarray) -> int:
    """Bytes of an array that the system has given memory for, to the page."""
    begin = array.ctypes.data - array.ctypes.data % mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages)
    assert found == 0
    return mmap.PAGESIZE * sum(page & 1 for page in pages)
