"""How far away a connection's other end is."""

from __future__ import annotations

import asyncio

from shared.http2.round_trip import round_trip_s


async def test_the_kernel_tells_of_a_connection() -> None:
    """Some microseconds to this machine; unknown of what is no connection."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b""
        assert 0.0 < round_trip_s(writer.transport) < 0.5
        writer.close()
    assert round_trip_s(asyncio.Transport()) == 0.0
