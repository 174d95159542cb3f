"""Packed columns: `bytes` fields of the wire that hold little-endian u32, f32, u64 or u8 values.

One C loop per column instead of one Python object per number: that is what keeps the message
library off the token path (docs/adr/0002-messages.md). Packing raises LocalProtocolError for values
that do not fit; unpacking raises RemoteProtocolError for lengths that do not. Values lie as in this
machine's memory: whoever serves is little-endian, and KV crosses as it lies there, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from shared.errors import LocalProtocolError, RemoteProtocolError


def _pack(typecode: str, values: Iterable[int] | Iterable[float]) -> bytes:
    if not values:  # an empty list, as most columns of an order are
        return b""
    try:
        return array(typecode, values).tobytes()
    except (OverflowError, TypeError) as error:
        raise LocalProtocolError(f"a value does not fit into a column: {error}") from error


def _unpack(typecode: str, data: bytes, count: int | None, name: str) -> Any:
    try:
        column: array[Any] = array(typecode, data)
    except ValueError:
        column = array(typecode)
        raise _wrong_length(data, count, column.itemsize, name) from None
    if count is not None and len(column) != count:
        raise _wrong_length(data, count, column.itemsize, name)
    return column


def _wrong_length(
    data: bytes, count: int | None, item_bytes: int, name: str
) -> RemoteProtocolError:
    wanted = f"{count} values" if count is not None else f"whole values of {item_bytes} bytes"
    where = name or "a column"
    return RemoteProtocolError(f"{where} has {len(data)} bytes, not {wanted}", param=name)


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack values of [0, 2^32)."""
    return _pack("I", values)


def unpack_u32(data: bytes, *, count: int | None = None, name: str = "") -> Sequence[int]:
    """Unpack to a read-only-by-convention ``array``; count: the number of values it must hold."""
    return _unpack("I", data, count, name)


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack values of [0, 2^64)."""
    return _pack("Q", values)


def unpack_u64(data: bytes, *, count: int | None = None, name: str = "") -> Sequence[int]:
    return _unpack("Q", data, count, name)


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack floats, rounded to f32; NaN and infinities are kept."""
    return _pack("f", values)


def unpack_f32(data: bytes, *, count: int | None = None, name: str = "") -> Sequence[float]:
    """Unpack f32 values, NaN and infinities among them."""
    return _unpack("f", data, count, name)


def pack_u8(values: Iterable[int]) -> bytes:
    """Pack values of [0, 256)."""
    try:
        return bytes(values)
    except (ValueError, TypeError) as error:
        raise LocalProtocolError(f"a value does not fit into a column: {error}") from error


def unpack_u8(data: bytes, *, count: int | None = None, name: str = "") -> Sequence[int]:
    if count is not None and len(data) != count:
        raise _wrong_length(data, count, 1, name)
    return data
