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

from shared.engine.base import Buffer
from shared.transfer.frames import HEADER_BYTES


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
