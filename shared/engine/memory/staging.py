"""Frames in staging buffers: where the header stands, where the payload, and what its digest is.

A staging buffer comes from ``Engine.new_buffer``: host memory (numpy) or device memory (a tensor).
On a device the header takes a small copy each way, and a digest takes the whole frame through the
host, so it is left out there unless asked for. All functions may block: they belong on the copy
thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from shared.engine.base import Buffer, Engine
from shared.errors import EngineFailed
from shared.transfer.frames import HEADER_BYTES
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES


def slots_of_a_way(staging_mib: int, *, for_prefixes: bool) -> int:
    """Return the staging slots of one way that KV may take; prefixes alone need fewer."""
    num = (staging_mib << 20) // DEFAULT_MAX_FRAME_BYTES
    return max(2, num // 2) if for_prefixes else num


class StagingSlots:
    """A worker's staging buffers, by slot number."""

    def __init__(self, engine: Engine, num_slots: int, num_bytes: int) -> None:
        self._engine = engine
        self._num_bytes = num_bytes
        self._buffers = [engine.new_buffer(num_bytes) for _ in range(num_slots)]
        self._num_spare = num_slots

    def __getitem__(self, slot: int) -> Buffer:
        return self._buffers[slot]

    def replace(self, slot: int) -> None:
        """Put a new buffer into the slot: the transport has abandoned an operation on the old one,
        and may read or write that for ever.

        As often as there are slots. Raises EngineFailed: more would leak without end; only a new
        process helps.
        """
        if not self._num_spare:
            raise EngineFailed("the transport gave up on too many buffers", code="staging_leaked")
        self._num_spare -= 1
        self._buffers[slot] = self._engine.new_buffer(self._num_bytes)


def is_on_device(buffer: Buffer) -> bool:
    """Whether the host cannot read the buffer in place."""
    return hasattr(buffer, "__cuda_array_interface__")


def write(buffer: Buffer, data: bytes) -> None:
    """Write host bytes to the front of the buffer; complete on return."""
    if is_on_device(buffer):
        tensor: Any = buffer
        tensor[: len(data)] = tensor.new_tensor(np.frombuffer(data, np.uint8))
        tensor[: len(data)].cpu()  # waits for the copy: UCX knows no streams
    else:
        memoryview(buffer).cast("B")[: len(data)] = data


def read_header(buffer: Buffer) -> bytes:
    """Return the 64 bytes in front of a frame."""
    if is_on_device(buffer):
        tensor: Any = buffer
        return bytes(tensor[:HEADER_BYTES].cpu().numpy())
    return bytes(memoryview(buffer).cast("B")[:HEADER_BYTES])


def payload(buffer: Buffer, num_bytes: int) -> Buffer:
    """Return the part of the buffer behind the header, without a copy."""
    view = memoryview(buffer) if isinstance(buffer, bytearray) else buffer
    return view[HEADER_BYTES : HEADER_BYTES + num_bytes]


def digest(data: Buffer) -> int:
    """Return xxh3_64 of the bytes."""
    if is_on_device(data):
        tensor: Any = data
        data = tensor.cpu().numpy()
    return xxhash.xxh3_64_intdigest(memoryview(data))
