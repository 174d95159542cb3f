"""How far away the other end of a connection is, as the kernel knows it."""

from __future__ import annotations

import asyncio
import socket
import struct

_MIN_RTT_AT = 148
"""Of ``tcpi_min_rtt`` in Linux's ``struct tcp_info``: the least of some minutes, in microseconds.
The mean would count how long the other end waits before it acknowledges."""


def round_trip_s(transport: asyncio.BaseTransport) -> float:
    """Return seconds to the other end and back, at least; 0 = the kernel does not tell."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0.0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
        (least_us,) = struct.unpack_from("<I", told, _MIN_RTT_AT)
    except (OSError, ValueError, struct.error):  # ValueError: uvloop's, of a closed connection
        return 0.0
    return least_us / 1e6 if least_us < 0xFFFFFFFF else 0.0
