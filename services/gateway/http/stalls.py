"""Waiting for a client to read, for as long as it does read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def unless_stalled(
    writing: Awaitable[None], transport: asyncio.WriteTransport, stall_s: float
) -> None:
    """Await ``writing``, which waits for room in the transport's buffer.

    Raises TimeoutError: for ``stall_s`` not a byte of the buffer has left. A client that reads
    slowly is waited for, however long it takes.
    """
    loop = asyncio.get_running_loop()
    unsent_bytes = transport.get_write_buffer_size()

    def look() -> None:
        nonlocal unsent_bytes, timer
        still_bytes = transport.get_write_buffer_size()
        if still_bytes >= unsent_bytes:
            limit.reschedule(loop.time())
        else:
            unsent_bytes = still_bytes
            timer = loop.call_later(stall_s, look)

    timer = loop.call_later(stall_s, look)
    try:
        async with asyncio.timeout(None) as limit:
            await writing
    finally:
        timer.cancel()
