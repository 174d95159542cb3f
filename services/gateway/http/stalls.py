"""A client that reads slowly is waited for; one that stalls, and reads nothing, is cut off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any

from shared.tcp_info import acknowledged_bytes


def keep_little_in_kernel(transport: asyncio.WriteTransport, num_bytes: int) -> None:
    """Give the socket a send buffer of about ``num_bytes``: else it takes megabytes before a client
    that reads nothing shows."""
    connection: Any = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)


def taken_of(transport: asyncio.WriteTransport) -> tuple[int, int]:
    """Return what changes whenever a client takes some of what was written: what waits here, and
    what it has. The first alone does not tell of what waits below TLS, and stands still until the
    kernel has room for a large piece."""
    return transport.get_write_buffer_size(), acknowledged_bytes(transport)


async def unless_stalled(
    writing: Awaitable[None], transport: asyncio.WriteTransport, stall_s: float
) -> None:
    """Await ``writing``, which waits for room in the transport's buffer.

    Raises TimeoutError: for ``stall_s`` the client took not a byte. One that reads slowly is waited
    for, however long it takes.
    """
    loop = asyncio.get_running_loop()
    before: tuple[int, int] | None = None  # nobody has looked

    def look() -> None:
        nonlocal before, timer
        # More waits than before: we have written, which we do only where there was room.
        if (now := taken_of(transport)) == before:
            limit.reschedule(loop.time())
        else:
            before = now
            timer = loop.call_later(stall_s, look)

    # Not before ``writing`` has begun: an empty buffer would be what nothing can be less than.
    timer: asyncio.Handle = loop.call_soon(look)
    try:
        async with asyncio.timeout(None) as limit:
            await writing
    finally:
        timer.cancel()
