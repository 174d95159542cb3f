"""Floods over real sockets, in either direction: they end, and the log grows by a line a minute."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
from h2.settings import SettingCodes
from hpack import Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    SettingsFrame,
)
from structlog.testing import capture_logs

from shared import wire
from shared.address import Address
from shared.http2.complaints import Complaints
from shared.http2.connection import ConnectionLimits
from shared.rpc.methods import GENERATE, TOKENIZE
from shared.rpc.tcp import TcpNetwork
from tests.support.calls import call_unary
from tests.support.echo_service import echo_server
from tests.support.raw_http2 import framed, raw_client

NUM_FRAMES = 50_000
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
CALL = HeadersFrame(
    1,
    Encoder().encode([
        (":method", "POST"), (":scheme", "http"), (":path", GENERATE.path), (":authority", "x"),
        ("content-type", "application/grpc"), ("te", "trailers"),
    ]),
    flags=["END_HEADERS"],
).serialize()  # fmt: skip
"""Opens a call on stream 1, which then waits for its request."""


def ping() -> Frame:
    return PingFrame(0, opaque_data=b"12345678")


def settings() -> Frame:
    return SettingsFrame(0)


def priority() -> Frame:
    return PriorityFrame(1, depends_on=0, stream_weight=3)


def goodbye() -> Frame:
    return GoAwayFrame(0)


def empty_data() -> Frame:
    return DataFrame(1, b"")


async def flood(address: Address, data: bytes) -> None:
    """Send it all, read nothing, and go when the other side does."""
    loop = asyncio.get_running_loop()
    with socket.create_connection((address.host, address.port)) as link:
        link.setblocking(False)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(link, HELLO + CALL + data)
            while await loop.sock_recv(link, 1 << 16):
                pass


@pytest.mark.parametrize("frame", [ping, settings, priority, goodbye, empty_data])
async def test_a_flood_of_frames_is_one_line(frame: Callable[[], Frame]) -> None:
    """Three floods of 50,000 frames end their connections and are one line of log; a decent client
    is answered afterwards."""
    network = TcpNetwork()
    with capture_logs() as lines:
        async with echo_server(network) as (_, server):
            async with asyncio.timeout(60):
                for _ in range(3):
                    await flood(server.address, frame().serialize() * NUM_FRAMES)
            async with network.channel(server.address) as channel:
                reply = await call_unary(channel, TOKENIZE, wire.TokenizeRequest(text="fine"))
            assert reply.token_ids == b"fine"
    (line,) = lines
    assert line["event"] == "closing a connection"
    assert line["peer"] == "127.0.0.1"


async def test_who_reads_nothing_is_gone_with_the_call_soon() -> None:
    """A client that asks for much and reads none of it loses its connection when it leaves pings
    unanswered, and its call is cancelled."""
    limits = ConnectionLimits(keepalive_s=0.1, keepalive_timeout_s=0.2, close_within_s=0.1)
    async with echo_server(TcpNetwork(limits=limits)) as (service, server):
        async with raw_client(server.address) as client:
            client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
            client.h2.increment_flow_control_window(1 << 30)
            client.h2.send_headers(1, client.headers(GENERATE.path))
            flood_asked = bytes(wire.GenerateRequest(text="flood:1000"))
            client.h2.send_data(1, framed(flood_asked), end_stream=True)
            await client.flush()
            client.writer.transport.pause_reading()
            async with asyncio.timeout(10):
                await service.ended.wait()
        assert service.num_cancelled == 1


async def test_a_call_that_is_reset_behind_a_full_connection_ends_at_once() -> None:
    """Its last word would wait until the client reads, and be kept for it, also by a drain."""
    async with echo_server(TcpNetwork()) as (service, server), raw_client(server.address) as client:
        client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        client.h2.increment_flow_control_window(1 << 30)
        client.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        client.h2.send_headers(1, client.headers(GENERATE.path))
        request = bytes(wire.GenerateRequest(text="flood:1000"))
        client.h2.send_data(1, framed(request), end_stream=True)
        await client.flush()
        (connection,) = server._protocols
        async with asyncio.timeout(5):
            while connection.connection.write_ready.is_set():
                await service.started.wait()
                await asyncio.sleep(0)
        client.h2.reset_stream(1)
        await client.flush()
        async with asyncio.timeout(5):
            await service.ended.wait()
            assert await server.drain(1.0)
        assert service.num_cancelled == 1
        assert not connection.closed.is_set()
        assert not connection.processor.streams


def test_a_line_says_how_many_were_left_out() -> None:
    """The first of a minute is told at once; the next minute's first says what was not."""
    complaints = Complaints()
    assert complaints.count(100.0) == 0
    assert [complaints.count(100.0 + second) for second in range(1, 60)] == [None] * 59
    assert complaints.count(160.0) == 59
    assert complaints.count(161.0) is None
