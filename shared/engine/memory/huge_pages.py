"""Host memory in huge pages (Linux), zero until written.

KV pools, packed weights and staging buffers are large and read all over; with pages of 4 KiB most
jumps miss the TLB. numpy asks for huge pages where it fills memory itself but not for zeros, torch
never does, so the mapping is made here. Where the kernel has none to give, small ones serve.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

_HUGE = 2 << 20
_CPU = torch.device("cpu")


def zeros(num_bytes: int) -> np.ndarray:
    """Return ``[num_bytes]`` uint8 of zeros, aligned to a huge page if it is at least one long.

    Memory is taken when it is first touched; it lives as long as the array or a view of it. Raises
    MemoryError: there is not so much.
    """
    if num_bytes < _HUGE:
        return np.zeros(num_bytes, dtype=np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, gets no huge pages
    try:
        # A page more than is asked for: mmap aligns to small pages, and the beginning is skipped up
        # to a huge one.
        mapping = mmap.mmap(-1, num_bytes + _HUGE, flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of host memory: {error.strerror}") from error
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, dtype=np.uint8)
    skipped = -array.ctypes.data % _HUGE
    return array[skipped : skipped + num_bytes]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Return such zeros as a tensor; on another device ordinary ones."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    octets = zeros(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(octets).view(dtype).view(shape)
