"""How far away a connection's other end is, and what it has taken."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shared.tcp_info import acknowledged_bytes, round_trip_s


async def _answer_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(5)
    writer.close()


async def test_the_kernel_tells_of_a_connection() -> None:
    """Some microseconds to this machine, and what it has; unknown of what is no connection."""
    server = await asyncio.start_server(_answer_nothing, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        before = acknowledged_bytes(writer.transport)
        writer.write(b"hello")
        assert await reader.read() == b""
        assert 0.0 < round_trip_s(writer.transport) < 0.5
        assert acknowledged_bytes(writer.transport) == before + len(b"hello")
        writer.close()
    assert round_trip_s(asyncio.Transport()) == acknowledged_bytes(asyncio.Transport()) == 0


def test_of_a_connection_that_is_closed_nothing_is_known() -> None:
    """uvloop raises another error than sockets do; who asks is a timer, which may not fail."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            reader, writer = await asyncio.open_connection(*server.getsockname())
            assert round_trip_s(writer.transport) > 0.0
            writer.transport.abort()
            await reader.read()
            assert round_trip_s(writer.transport) == 0.0

    uvloop.run(main())
