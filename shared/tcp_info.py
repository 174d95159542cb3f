"""What the kernel knows of a connection: how far away its other end is, and what that has taken."""

from __future__ import annotations

import asyncio
import socket
import struct

_ACKNOWLEDGED = "<Q", 120
"""Of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""
_MIN_RTT = "<I", 148
"""Of ``tcpi_min_rtt``: the least of some minutes, in microseconds. The mean would count how long
the other end waits before it acknowledges."""


def round_trip_s(transport: asyncio.BaseTransport) -> float:
    """Return seconds to the other end and back, at least; 0 = the kernel does not tell."""
    least_us = _told(transport, *_MIN_RTT)
    return least_us / 1e6 if least_us < 0xFFFFFFFF else 0.0


def acknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Return how much of what was sent the other end's machine has; 0 = the kernel does not
    tell."""
    return _told(transport, *_ACKNOWLEDGED)


def _told(transport: asyncio.BaseTransport, kind: str, place: int) -> int:
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        size = place + struct.calcsize(kind)
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        (number,) = struct.unpack_from(kind, told, place)
    except (OSError, ValueError, struct.error):  # ValueError: uvloop's, of a closed connection
        return 0
    return number
