"""A client that reads slowly is waited for; one that stalls, and reads nothing, is cut off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any


def keep_little_in_kernel(transport: asyncio.WriteTransport, num_bytes: int) -> None:
    """Give the socket a send buffer of about ``num_bytes``.

    Else it takes megabytes before a slow client shows, and then nothing until a third of them has
    left: what is read steadily would look like a stall.
    """
    connection: Any = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)


async def unless_stalled(
    writing: Awaitable[None], transport: asyncio.WriteTransport, stall_s: float
) -> None:
    """Await ``writing``, which waits for room in the transport's buffer.

    Raises TimeoutError: for ``stall_s`` not a byte of the buffer has left. A client that reads
    slowly is waited for, however long it takes.
    """
    loop = asyncio.get_running_loop()
    unsent_bytes = -1  # nobody has looked

    def look() -> None:
        nonlocal unsent_bytes, timer
        still_bytes = transport.get_write_buffer_size()
        # More than before means that we have written, which we do only where there was room.
        if still_bytes == unsent_bytes:
            limit.reschedule(loop.time())
        else:
            unsent_bytes = still_bytes
            timer = loop.call_later(stall_s, look)

    # Not before ``writing`` has begun: an empty buffer would be what nothing can be less than.
    timer: asyncio.Handle = loop.call_soon(look)
    try:
        async with asyncio.timeout(None) as limit:
            await writing
    finally:
        timer.cancel()
