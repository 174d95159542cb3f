"""Windows by UCX's hands: memory that a peer on the same host maps and writes by itself.

UCX allocates it as a System V segment, where sysv is among its transports, and a peer whose
endpoint reaches such segments gets a pointer of its own into it (``ucp_rkey_ptr``). Nothing of UCX
is in the path of the bytes after that. Calls of ``WindowApi`` belong to the pump's thread, which
alone touches UCX; the memory itself may be used and dropped on any.

UCX knows no size of what a key leads to, and falls back to other memory without a word; so the
kernel is asked: a window is a whole System V segment or part of one, on both sides, or it is none.
That is the fence's ground, too: new memory is another segment, never the old one's addresses.

Structures and constants: ``ucp/api/ucp.h`` of UCX 1.21.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable
from ctypes import Structure, byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from shared.errors import TransferFailed
from shared.transport.address import seal, unseal
from shared.transport.base import Buffer, Window
from shared.transport.ucp import declared

_MAGIC = b"UCXW"
_PLACE = struct.Struct("<QQ")  # address and length, in the owner's process; UCX's key follows
_MAP_LENGTH = 1 << 1
_MAP_FLAGS = 1 << 2
_NONBLOCK = 1 << 0  # pages come when they are touched
_ALLOCATE = 1 << 1
_ATTR_ADDRESS = 1 << 0

OnRelease = Callable[[Callable[[int], None], int], object]
"""Has the pump call the first with the second. Called on any thread, whenever memory is dropped."""


class _MapParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
    )


class _MemoryAttr(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("memory_type", c_int),
        ("packed", c_size_t),
    )


class WindowApi:
    """Windows of one UCX context: our own, and those of peers that we have mapped."""

    def __init__(self, context_handle: int, on_release: OnRelease) -> None:
        self._lib = declared("libucp.so.0", _UCP)
        self._context = context_handle
        self._on_release = on_release
        self.num_live = 0
        """Own and mapped ones; the context and its worker must outlive them."""

    def allocate(self, num_bytes: int) -> Window | None:
        """Return new memory, not zeroed; None: UCX could not give any."""
        handle = c_void_p()
        wanted = _MapParams(
            field_mask=_MAP_LENGTH | _MAP_FLAGS, length=num_bytes, flags=_ALLOCATE | _NONBLOCK
        )
        if self._lib.ucp_mem_map(self._context, byref(wanted), byref(handle)) or not handle.value:
            return None
        attr, packed, size = _MemoryAttr(field_mask=_ATTR_ADDRESS), c_void_p(), c_size_t()
        if (
            self._lib.ucp_mem_query(handle, byref(attr))
            or not _is_segment(attr.address, num_bytes)
            or self._lib.ucp_rkey_pack(self._context, handle, byref(packed), byref(size))
        ):
            self._lib.ucp_mem_unmap(self._context, handle)
            return None
        key = ctypes.string_at(packed.value or 0, size.value)
        self._lib.ucp_rkey_buffer_release(packed)
        memory = self._memory_at(attr.address, num_bytes, self._free, handle.value)
        return Window(memory, seal(_MAGIC, _PLACE.pack(attr.address, num_bytes) + key))

    def map(self, endpoint_handle: int, key: bytes) -> Buffer | None:
        """Return the peer's memory; None: this endpoint reaches none of it, or less than the key
        says.

        Raises TransferFailed: not the key of a window, or damaged.
        """
        payload = unseal(_MAGIC, key)
        if len(payload) <= _PLACE.size:
            raise TransferFailed("the peer's window has no key", code="address")
        address, num_bytes = _PLACE.unpack_from(payload)
        handle, pointer = c_void_p(), c_void_p()
        ucx_key = payload[_PLACE.size :]
        if self._lib.ucp_ep_rkey_unpack(endpoint_handle, ucx_key, byref(handle)):
            return None
        status = self._lib.ucp_rkey_ptr(handle, address, byref(pointer))
        place = 0 if status else pointer.value or 0
        if not handle.value or not _is_segment(place, num_bytes):
            self._lib.ucp_rkey_destroy(handle)
            return None
        return self._memory_at(place, num_bytes, self._unmap, handle.value)

    def _memory_at(
        self, pointer: int, num_bytes: int, release: Callable[[int], None], handle: int
    ) -> Buffer:
        # A class of its own, because arrays of ctypes themselves cannot be watched for their end.
        kind: Any = type("SharedMemory", (ctypes.c_uint8 * num_bytes,), {})
        memory = kind.from_address(pointer)
        self.num_live += 1
        weakref.finalize(memory, self._on_release, release, handle).atexit = False
        return memory

    def _free(self, handle: int) -> None:
        self.num_live -= 1
        self._lib.ucp_mem_unmap(self._context, handle)

    def _unmap(self, handle: int) -> None:
        self.num_live -= 1
        self._lib.ucp_rkey_destroy(handle)


def _is_segment(pointer: int, num_bytes: int) -> bool:
    """Whether these bytes lie within one System V segment that this process may write."""
    if num_bytes < 1:
        return False
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "/SYSV" in line:
                addresses, access, _ = line.split(" ", 2)
                first, last = (int(edge, 16) for edge in addresses.split("-"))
                if first <= pointer < last:
                    return pointer + num_bytes <= last and access == "rw-s"
    return False


_UCP = (
    ("ucp_mem_map", c_int8, (c_void_p, c_void_p, c_void_p)),
    ("ucp_mem_query", c_int8, (c_void_p, c_void_p)),
    ("ucp_mem_unmap", c_int8, (c_void_p, c_void_p)),
    ("ucp_rkey_pack", c_int8, (c_void_p, c_void_p, c_void_p, c_void_p)),
    ("ucp_rkey_buffer_release", None, (c_void_p,)),
    ("ucp_ep_rkey_unpack", c_int8, (c_void_p, c_char_p, c_void_p)),
    ("ucp_rkey_ptr", c_int8, (c_void_p, c_uint64, c_void_p)),
    ("ucp_rkey_destroy", None, (c_void_p,)),
)
