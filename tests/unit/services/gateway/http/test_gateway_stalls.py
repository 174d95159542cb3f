"""Clients that read slowly, or not at all."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, cast

import pytest

from services.gateway import limits
from services.gateway.front.calls import Call
from services.gateway.http.connection import (
    BUFFER_BYTES,
    Connection,
    HttpRequest,
    listen,
)
from services.gateway.http.messages import Response
from services.gateway.http.server import AllowedOrigins, Policy, Route, Routes
from services.gateway.http.sse import EventStream
from services.gateway.http.stalls import unless_stalled
from shared.address import Address
from shared.errors import DeadlinePassed
from tests.support.http_client import raw_connection
from tests.support.scripted_mesh import ScriptedMesh, front_door
from tests.support.virtual_loop import virtual_time


class Link:
    """A transport from which a client takes so many bytes a second."""

    def __init__(self, unsent_bytes: int, bytes_per_s: int) -> None:
        self._unsent_bytes, self._bytes_per_s = unsent_bytes, bytes_per_s
        self._since = asyncio.get_running_loop().time()
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        read_s = asyncio.get_running_loop().time() - self._since
        return max(0, self._unsent_bytes - int(read_s * self._bytes_per_s))

    def set_write_buffer_limits(self, high: int) -> None:
        """Nothing here is paused by itself."""

    def get_extra_info(self, name: str) -> None:
        del name

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        """What waits leaves first."""

    def write(self, data: bytes) -> None:
        """Some bytes more make no difference."""

    async def fill(self, num_bytes: int) -> None:
        """Fill the buffer, and wait until all is read."""
        self._unsent_bytes, self._since = num_bytes, asyncio.get_running_loop().time()
        await self.drained()

    async def drained(self) -> None:
        """Wait until all is read."""
        while self.get_write_buffer_size():
            await asyncio.sleep(1.0)


@virtual_time
async def test_a_slow_client_is_waited_for() -> None:
    """Hundred seconds for a buffer, as long as some of it leaves every ten."""
    link: Any = Link(10_000, 100)
    await unless_stalled(link.drained(), link, 10.0)
    assert asyncio.get_running_loop().time() >= 100


@virtual_time
async def test_a_slow_client_of_a_large_answer_is_waited_for() -> None:
    """The buffer is empty when the answer is handed over: what counts is what it was filled to."""
    link: Any = Link(0, 100)
    await unless_stalled(link.fill(10_000), link, 10.0)
    assert asyncio.get_running_loop().time() >= 100


@virtual_time
async def test_a_client_that_reads_nothing_of_a_large_answer_is_not() -> None:
    """After the limit, no later than where the buffer was full before."""
    link: Any = Link(0, 0)
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await unless_stalled(link.fill(10_000), link, 10.0)
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(10.0)


@virtual_time
async def test_a_client_that_reads_nothing_is_not() -> None:
    """After the limit, whatever was read before."""
    link: Any = Link(10_000, 0)
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await unless_stalled(link.drained(), link, 10.0)
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(10.0)


@virtual_time
async def test_what_fails_fails_as_it_did() -> None:
    """The client has gone."""

    async def gone() -> None:
        raise ConnectionResetError

    link: Any = Link(10_000, 0)
    with pytest.raises(ConnectionResetError):
        await unless_stalled(gone(), link, 10.0)


@virtual_time
async def test_a_paused_stream_is_watched_though_its_buffer_has_room() -> None:
    """A transport resumes its writer when the buffer is nearly empty: a client that reads some of
    it and then stops is cut like any other."""
    link = Link(BUFFER_BYTES // 2, 0)
    listener: Any = None
    connection = Connection(listener, asyncio.get_running_loop())
    connection.transport = cast("Any", link)
    connection.pause_writing()

    class Asked:
        is_http11 = True

    request: Any = Asked()
    request.connection = connection
    events = EventStream(request, {}, stall_s=10.0)
    events.has_begun = True
    with pytest.raises(DeadlinePassed):
        await events.write(b"data: x\n\n")
    assert link.is_aborted


class TlsLink(Link):
    """Its buffer stays full while the one below it empties, of which TCP alone tells."""

    def get_write_buffer_size(self) -> int:
        return BUFFER_BYTES

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else None

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        acknowledged = (1 << 40) - super().get_write_buffer_size()
        return (bytes(120) + acknowledged.to_bytes(8, sys.byteorder))[:size]


@virtual_time
async def test_a_slow_client_over_tls_is_waited_for() -> None:
    """Though for longer than a stall nothing changes in the buffer that is seen; one that reads
    nothing is cut."""
    link: Any = TlsLink(10_000, 100)
    await unless_stalled(asyncio.sleep(90), link, 10.0)
    link = TlsLink(10_000, 0)
    with pytest.raises(TimeoutError):
        await unless_stalled(asyncio.sleep(90), link, 10.0)


@pytest.mark.parametrize(("bytes_per_s", "is_cut"), [(100, False), (0, True)])
@virtual_time
async def test_a_connection_that_ends_waits_for_a_slow_client(
    bytes_per_s: int, is_cut: bool
) -> None:
    """To read the last bytes, but for no client that reads nothing."""
    link, listener = Link(10_000, bytes_per_s), cast("Any", None)
    connection = Connection(listener, asyncio.get_running_loop())
    connection.transport = cast("Any", link)
    connection.end()
    await asyncio.sleep(9 * limits.STALL_S)
    assert link.is_aborted is is_cut
    connection.transport = None


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_client_that_does_not_read_a_whole_answer_is_cut(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than all buffers on the way; who reads gets it whole."""
    monkeypatch.setattr(limits, "STALL_S", 0.2)
    body = bytes(16 << 20)
    is_over = asyncio.Event()
    send = Connection.send

    async def sent(self: Connection, request: HttpRequest, response: Response) -> None:
        try:
            await send(self, request, response)
        finally:
            is_over.set()

    monkeypatch.setattr(Connection, "send", sent)

    async def large(request: HttpRequest, call: Call) -> Response:
        del request, call
        return Response(200, body, {})

    front = front_door(ScriptedMesh())
    route = Route("GET", "/large", Policy.ANYBODY, large, "text/plain")
    routes = Routes(front, [route], AllowedOrigins())
    async with (
        listen(routes.handle, Address("127.0.0.1", 0)) as address,
        raw_connection(f"http://{address}") as (reader, writer),
    ):
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if is_read:
            assert (await reader.read()).endswith(b"\r\n\r\n" + body)
        else:
            await is_over.wait()
            # The kernel has taken little: what it holds does not count as waiting.
            assert len(await reader.read()) < 1 << 20
    front.text.close()
