"""The HTTP connection: framing, order, limits and ends, over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.gateway import limits
from services.gateway.front.calls import Call
from services.gateway.http.connection import (
    HEADER_TIMEOUT_S,
    KEEPALIVE_S,
    LINGER_S,
    MAX_PIPELINED,
    HttpRequest,
    listen,
)
from services.gateway.http.messages import Response
from services.gateway.http.server import AllowedOrigins, Policy, Route, Routes
from shared.address import Address
from shared.errors import WorkerLost
from tests.support.http_client import memory_link, raw_connection
from tests.support.scripted_mesh import ScriptedMesh, front_door, http_gateway, saying
from tests.support.virtual_loop import virtual_time

BODY = b'{"prompt":"a"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def with_length(body: bytes = BODY, more: bytes = b"") -> bytes:
    """A request to complete a prompt."""
    return POST + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def asked(data: bytes, mesh: ScriptedMesh | None = None, *, ends: bool = False) -> bytes:
    """Send bytes to a gateway; returns all that it sends until it closes the connection. ends: and
    then the end of this side."""
    async with (
        http_gateway(mesh or ScriptedMesh(saying("the"))) as url,
        raw_connection(url) as (reader, writer),
    ):
        writer.write(data)
        if ends:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()


def now() -> float:
    """The loop's time."""
    return asyncio.get_running_loop().time()


def split(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Cut whole responses: status, headers in lower case, body."""
    found: list[tuple[int, dict[str, str], bytes]] = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", "0"))
        found.append((int(first.split()[1]), headers, data[:length]))
        data = data[length:]
    return found


# --- order and keep-alive -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3 * MAX_PIPELINED])
async def test_requests_sent_ahead_are_answered_in_their_order(count: int) -> None:
    """Of several routes, on one connection, more than are taken in at once."""
    wanted = [with_length() if index % 2 else HEALTH for index in range(count)]
    mesh = ScriptedMesh(saying("the"))
    answers = split(await asked(b"".join(wanted) + LAST, mesh))
    assert [status for status, _, _ in answers] == [200] * (count + 1)
    for index, (_, headers, body) in enumerate(answers[:-1]):
        assert ("choices" in json.loads(body)) is bool(index % 2)
        assert "connection" not in headers
    assert answers[-1][1]["connection"] == "close"
    assert len(mesh.requests) == count // 2


async def test_a_request_may_come_byte_by_byte() -> None:
    """In as many pieces as it has bytes, its body framed either way."""
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n7\r\n" + BODY[:7] + b"\r\n7;a=b\r\n"
    chunked += BODY[7:] + b"\r\n0\r\nX-Trailer: y\r\n\r\n"
    async with (
        http_gateway(ScriptedMesh(saying("the"))) as url,
        raw_connection(url) as (reader, writer),
    ):
        for data in (with_length(), HEALTH, chunked):
            for index in range(len(data)):
                writer.write(data[index : index + 1])
                await writer.drain()
                await asyncio.sleep(0)
        answers = split(await reader.read())
    assert [status for status, _, _ in answers] == [200, 200, 200]


@pytest.mark.parametrize(
    ("version", "header", "is_kept"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: keep-alive\r\n", True),
    ],
)
async def test_a_connection_is_kept_where_both_ends_want_it(
    version: bytes, header: bytes, is_kept: bool
) -> None:
    """The default of each version, and what the client says."""
    request = b"GET /health HTTP/%b\r\nHost: x\r\n%b\r\n" % (version, header)
    answers = split(await asked(request + LAST))
    assert len(answers) == 1 + is_kept
    if not is_kept:
        assert answers[0][1]["connection"] == "close"
    elif version == b"1.0":
        assert answers[0][1]["connection"] == "keep-alive"


async def test_a_stream_leaves_its_connection_to_the_next_request() -> None:
    """Its chunks end where they say."""
    stream = with_length(b'{"prompt":"a","stream":true}')
    answer = await asked(stream + LAST)
    events, _, rest = answer.partition(b"\r\n0\r\n\r\n")
    assert events.count(b"HTTP/1.1 200") == 1
    assert b"data: [DONE]" in events
    assert [status for status, _, _ in split(rest)] == [200]


async def test_a_stream_to_http_1_0_ends_with_its_connection() -> None:
    """Also where the client wanted to keep it: nothing else tells the end."""
    stream = with_length(b'{"prompt":"a","stream":true}', b"Connection: keep-alive\r\n")
    answer = await asked(stream.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"Connection: close" in answer


async def test_heads_paths_and_dates() -> None:
    """HEAD has the length and no body; a path is decoded; the query is nobody's."""
    head = b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await asked(head)
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 15" in answer
    assert b"\r\nDate: " in answer
    for target in (b"/v1/models/t%69ny?x=1", b"http://elsewhere/v1/models/tiny"):
        ((status, _, body),) = split(
            await asked(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        )
        assert (status, json.loads(body)["id"]) == (200, "tiny")


# --- what could be read in two ways ---------------------------------------------------------------

CHUNKS = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 14\r\n\r\n" + CHUNKS,
        POST + b"Content-Length: 14\r\nContent-Length: 4\r\n\r\n" + BODY,
        POST + b"Content-Length: 14\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST + b"Content-Length: 14, 14\r\n\r\n" + BODY,
        POST + b"Content-Length: +14\r\n\r\n" + BODY,
        POST + b"Content-Length: 0x0e\r\n\r\n" + BODY,
        POST + b"Content-Length: 1_4\r\n\r\n" + BODY,
        POST + b"Content-Length: \r\n\r\n" + BODY,
        POST + b"Content-Length : 14\r\n\r\n" + BODY,
        POST + b" Content-Length: 14\r\n\r\n" + BODY,
        POST + b"X: y\r\n Content-Length: 14\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked\r\n , identity\r\n\r\n" + CHUNKS,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
        POST + b"Transfer-Encoding: identity\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
        POST + b"Transfer-Encoding\x00: chunked\r\n\r\n" + CHUNKS,
        POST + b"X: a\x00b\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST + b"X: a\rb\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST.replace(b"HTTP/1.1\r\nHost: x", b"HTTP/1.1") + b"Content-Length: 14\r\n\r\n" + BODY,
        POST + b"Host: y\r\nContent-Length: 14\r\n\r\n" + BODY,
        POST.replace(b"HTTP/1.1", b"HTTP/3.7") + b"Content-Length: 14\r\n\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked\r\n\r\n-e\r\n" + BODY + b"\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0e g\r\n" + BODY + b"\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + BODY,
        POST + b"Transfer-Encoding: chunked\r\n\r\ne\r\n" + BODY + b"XX0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("is_later", [False, True])
async def test_what_two_servers_could_read_in_two_ways_is_refused(
    data: bytes, is_later: bool
) -> None:
    """As the first request of a connection or after another: one answer, and the end; what follows
    it is never a request."""
    mesh = ScriptedMesh(saying("the"))
    *before, (status, headers, body) = split(
        await asked((HEALTH if is_later else b"") + data + with_length(), mesh)
    )
    assert [status for status, _, _ in before] in ([], [200])
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_http")
    assert headers["connection"] == "close"
    assert mesh.requests == []


@pytest.mark.parametrize("version", [b"", b" HTTP/2.0"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_other_versions_are_refused(version: bytes, num_before: int) -> None:
    """A line without one is of HTTP/0.9, which knows no headers and no bodies."""
    mesh = ScriptedMesh(saying("the"))
    data = HEALTH * num_before + with_length().replace(b" HTTP/1.1", version, 1)
    *before, (status, headers, body) = split(await asked(data, mesh))
    assert [status for status, _, _ in before] == [200] * num_before
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_http")
    assert headers["connection"] == "close"
    assert mesh.requests == []


@virtual_time
async def test_what_is_no_http_after_a_request_is_told_after_its_answer() -> None:
    """It arrives apart, while the request is answered: that is not harmed."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("the", gate=gate))
    async with memory_link(mesh) as link:
        link.say(with_length())
        await mesh.wait_running(1)
        link.say(b"canary\r\n\r\n")
        gate.release()
        answers = split(await link.reader.read())
    assert [status for status, _, _ in answers] == [200, 400]


async def test_who_sends_a_head_that_is_too_large_can_read_so() -> None:
    """Though most of it has not been looked at when that is told."""
    head = HEALTH[:-2] + b"X: %b\r\n\r\n" % (b"y" * 4_000_000)
    async with http_gateway(ScriptedMesh()) as url, raw_connection(url) as (reader, writer):
        writer.write(head)
        await asyncio.sleep(0)
        ((status, headers, _),) = split(await reader.read())
        assert (status, headers["connection"]) == (400, "close")
        async with asyncio.timeout(LINGER_S / 2):
            await writer.drain()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_chunks_in_http_1_0_are_a_connections_last() -> None:
    """A proxy of that version takes none for a body, and may take for one what follows."""
    chunked = POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n"
    request = chunked + b"Connection: keep-alive\r\n\r\n" + CHUNKS
    ((status, headers, _),) = split(await asked(request + LAST))
    assert (status, headers["connection"]) == (200, "close")


async def test_a_protocol_that_nobody_speaks_is_not_switched_to() -> None:
    """What follows the request is not looked at."""
    request = LAST.replace(b"Connection: close", b"Connection: Upgrade\r\nUpgrade: websocket")
    ((status, headers, _),) = split(await asked(request + HEALTH))
    assert (status, headers["connection"]) == (200, "close")


async def test_what_came_behind_an_upgrade_and_is_lost_is_told_so() -> None:
    """Java's client asks for h2c with each request: its connection is kept, unless it has sent
    ahead, for of that the parser drops what came in the same read."""
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    get, post = HEALTH.replace(b"\r\n\r\n", b"\r\n" + h2c + b"\r\n"), with_length(more=h2c)
    chunked = POST + h2c + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
    async with (
        http_gateway(ScriptedMesh(saying("the"))) as url,
        raw_connection(url) as (reader, writer),
    ):
        for request in (get, post, chunked):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            ((status, headers, _),) = split(head)
            await reader.readexactly(int(headers["content-length"]))
            assert (status, "connection" in headers) == (200, False)
    trailed = chunked[:-2] + b"X-T: y\r\n\r\n"
    for request in (get, post, chunked, HEALTH + post, trailed):
        *_, (status, headers, _) = split(await asked(request + chunked))
        assert (status, headers["connection"]) == (200, "close")


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LABEL = b"X-Request-Id: of-somebody-else\r\n"


@pytest.mark.parametrize("trailer", [LABEL, b"A: b\r\n" + LABEL])
@pytest.mark.parametrize("num_apart", [0, 1, 5, len(CHUNKS) - 2, len(CHUNKS)])
@virtual_time
async def test_a_trailer_is_no_header_of_the_next_request(trailer: bytes, num_apart: int) -> None:
    """However it is cut, its request is answered and the connection ends."""
    mesh = ScriptedMesh(saying("the"))
    data = CHUNKED + CHUNKS[:-2] + trailer + b"\r\n"
    async with memory_link(mesh) as link:
        cut = len(CHUNKED) + num_apart
        for piece in (data[:cut], data[cut:] + (with_length() if num_apart == 0 else b"")):
            link.say(piece)
            await asyncio.sleep(0)
        link.say(with_length())
        ((status, headers, _),) = split(await link.reader.read())
    assert (status, headers["connection"]) == (200, "close")
    assert len(mesh.requests) == 1


@pytest.mark.parametrize("num_before", [0, MAX_PIPELINED - 1])
@pytest.mark.parametrize("cut", [0, 5])
@virtual_time
async def test_what_follows_a_trailer_does_not_hide_it(num_before: int, cut: int) -> None:
    """It looks like the end of chunks, and the parser may have kept it for later."""
    trailed = CHUNKED + CHUNKS[:-2] + LABEL + b"\r\n"
    data = HEALTH * num_before + trailed + CHUNKED + CHUNKS
    at = len(HEALTH * num_before + CHUNKED) + cut if cut else len(data)
    async with memory_link(ScriptedMesh(saying("the"))) as link:
        link.say(data[:at])
        if at < len(data):
            link.say(data[at:])
        answers = split(await link.reader.read())
    assert len(answers) == num_before + 1
    assert answers[-1][1]["connection"] == "close"


@virtual_time
async def test_chunks_that_come_apart_do_not_hide_what_is_lost_behind_an_upgrade() -> None:
    """The end of a lost request looks like the end of the chunks before it."""
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    head = CHUNKED[:-2] + h2c + b"\r\n"
    async with memory_link(ScriptedMesh(saying("the"))) as link:
        link.say(head + CHUNKS[:5])
        await asyncio.sleep(0)
        link.say(CHUNKS[5:-2] + LABEL + b"\r\n" + head + CHUNKS)
        ((status, headers, _),) = split(await link.reader.read())
        assert (status, headers["connection"]) == (200, "close")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
async def test_chunks_without_a_trailer_leave_their_connection(size: int) -> None:
    """In pieces of any size."""
    async with (
        http_gateway(ScriptedMesh(saying("the"))) as url,
        raw_connection(url) as (reader, writer),
    ):
        for _ in range(2):
            data = CHUNKED + CHUNKS
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await asyncio.sleep(0.001)
            ((status, headers, _),) = split(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(int(headers["content-length"]))
            assert (status, "connection" in headers) == (200, False)


@pytest.mark.parametrize("length", [limits.MAX_BODY_BYTES + 1, 2**64 - 2, 2**64 - 1])
async def test_a_body_longer_than_any_is_refused_and_its_connection_ends(length: int) -> None:
    """At once, and with a word of that, also where the parser takes it for none."""
    head = POST + b"Content-Length: %d\r\n\r\n" % length
    ((status, headers, _),) = split(await asked(head))
    assert (status, headers["connection"]) == (413, "close")


async def test_a_length_may_have_any_number_of_zeros() -> None:
    """Python's ``int`` takes 4,300 digits; the parser takes them all."""
    request = POST + b"Content-Length: %b14\r\n\r\n" % (b"0" * 5000) + BODY + LAST
    assert [status for status, _, _ in split(await asked(request))] == [200, 200]


async def test_headers_of_a_response_cannot_be_forged() -> None:
    """A line's end in one is our bug, and nothing is sent."""

    async def forged(request: HttpRequest, call: Call) -> Response:
        del request, call
        return Response(200, b"", {"X": "a\r\nSet-Cookie: b"})

    async with served(forged) as (reader, writer):
        writer.write(LAST.replace(b"/health", b"/x"))
        assert await reader.read() == b""
    writer.close()


# --- bodies ---------------------------------------------------------------------------------------


@virtual_time
async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    """With 100; and not where the body is refused at once."""
    async with memory_link(ScriptedMesh(saying("the"))) as link:
        link.say(POST + b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n")
        asked_for = await link.reader.readuntil(b"\r\n\r\n")
        assert asked_for == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.say(BODY + LAST)
        assert [status for status, _, _ in split(await link.reader.read())] == [200, 200]
    async with memory_link(ScriptedMesh()) as link:
        more = b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
        link.say(POST + more + b" " * 100_000)
        ((status, headers, _),) = split(await link.reader.read())
    assert (status, headers["connection"]) == (413, "close")


@virtual_time
async def test_an_early_answer_can_be_read_by_who_still_sends() -> None:
    """What is still sent is taken for a while, and then the connection ends."""
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    async with memory_link(ScriptedMesh()) as link:
        link.say(head)
        for _ in range(5):
            link.say(b" " * 10_000)
            await asyncio.sleep(LINGER_S / 10)
            assert not link.closed.is_set()
        await link.closed.wait()
        assert now() == pytest.approx(LINGER_S)
        ((status, headers, _),) = split(await link.reader.read())
    assert (status, headers["connection"]) == (404, "close")


@pytest.mark.parametrize("chunk", [b" " * 10_000, b"2710\r\n" + b" " * 10_000 + b"\r\n"])
@virtual_time
async def test_after_an_early_answer_a_connection_ends_with_the_body(chunk: bytes) -> None:
    """Nobody has anything left to say, and what follows is no request."""
    is_chunked = chunk.startswith(b"2710")
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 300000"
    async with memory_link(ScriptedMesh()) as link:
        link.say(b"POST /nowhere HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        for _ in range(30):
            link.say(chunk)
            await asyncio.sleep(LINGER_S / 100)
        link.say(b"0\r\n\r\n" * is_chunked + HEALTH)
        await link.closed.wait()
        assert now() == pytest.approx(LINGER_S * 0.3)
        ((status, headers, _),) = split(await link.reader.read())
    assert (status, headers["connection"]) == (404, "close")


# --- limits and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "limit_s"),
    [
        ([], HEADER_TIMEOUT_S),
        ([HEALTH[:10]], HEADER_TIMEOUT_S),
        ([HEALTH], KEEPALIVE_S),
        ([HEALTH, HEALTH[:10]], HEADER_TIMEOUT_S),
        ([HEALTH + HEALTH[:1]], HEADER_TIMEOUT_S),
        ([HEALTH + HEALTH[:-2]], HEADER_TIMEOUT_S),
        ([with_length()[:-5], with_length()[-5:]], KEEPALIVE_S),
        ([with_length()[:-5], with_length()[-5:] + HEALTH[:10]], HEADER_TIMEOUT_S),
    ],
)
@virtual_time
async def test_a_silent_connection_is_closed(parts: list[bytes], limit_s: float) -> None:
    """Before its first request, amid one's headers, however they began, and between two."""
    async with memory_link(ScriptedMesh()) as link:
        for part in parts:
            link.say(part)
        answers = split(await link.reader.read())
        assert now() == pytest.approx(limit_s)
    assert len(answers) == b"".join(parts).count(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("begun", "limit_s"), [(b"", KEEPALIVE_S), (HEALTH[:10], HEADER_TIMEOUT_S)]
)
@virtual_time
async def test_headers_that_begin_amid_an_answer_have_no_longer(
    begun: bytes, limit_s: float
) -> None:
    """Their time runs from its end; the end of its own request's body begins none."""
    gate = asyncio.Semaphore(0)
    async with memory_link(ScriptedMesh(saying("the", gate=gate))) as link:
        for part in (with_length()[:-5], with_length()[-5:], begun):
            link.say(part)
            await asyncio.sleep(HEADER_TIMEOUT_S * 0.75)
        gate.release()
        await link.reader.readuntil(b"}}}")
        ended_at = now()
        assert await link.reader.read() == b""
        assert now() - ended_at == pytest.approx(limit_s)


@virtual_time
async def test_slow_headers_are_not_kept_alive_by_a_byte_now_and_then() -> None:
    """Their time runs from their first byte."""
    async with memory_link(ScriptedMesh()) as link:
        link.say(HEALTH)
        await link.reader.readuntil(b"}")
        began_at = now()
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 2000:
            link.say(bytes([byte]))
            if link.closed.is_set():
                break
            await asyncio.sleep(HEADER_TIMEOUT_S / 20)
        assert now() - began_at == pytest.approx(HEADER_TIMEOUT_S, rel=0.1)


@virtual_time
async def test_headers_that_begin_between_requests_have_no_longer() -> None:
    """Their time does not end with that of a connection that asks nothing."""
    async with memory_link(ScriptedMesh()) as link:
        link.say(HEALTH)
        await link.reader.readuntil(b"}")
        await asyncio.sleep(KEEPALIVE_S - 1.0)
        began_at = now()
        link.say(HEALTH[:10])
        assert await link.reader.read() == b""
        assert now() - began_at == pytest.approx(HEADER_TIMEOUT_S)


async def test_more_connections_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks nothing makes room, also amid a head; while all are asked who comes is closed
    unread, for an answer would cost what the limit is there to save."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 1)
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("the", gate=gate))
    async with http_gateway(mesh) as url, raw_connection(url) as (idle, first):
        first.write(HEALTH + HEALTH[:10])
        await idle.readuntil(b"}")
        async with raw_connection(url) as (reader, writer):
            writer.write(with_length())
            await mesh.wait_running(1)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    assert await idle.read() == b""
            async with raw_connection(url) as (refused, other):
                other.write(HEALTH)
                with contextlib.suppress(ConnectionError):
                    assert await refused.read() == b""
            gate.release()
            await reader.readuntil(b"}}}")
        await asyncio.sleep(0.05)
        async with raw_connection(url) as (reader, writer):
            writer.write(LAST)
            assert split(await reader.read())[0][0] == 200


@asynccontextmanager
async def served(
    handler: Any, *, drain_s: float = 5.0
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a listener with one route, ``/x``, which closes when the block ends."""
    front = front_door(ScriptedMesh())
    route = Route("GET", "/x", Policy.ANYBODY, handler, "text/plain")
    routes = Routes(front, [route], AllowedOrigins())
    try:
        async with listen(routes.handle, Address("127.0.0.1", 0), drain_s=drain_s) as address:
            host, port = str(address).split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            yield reader, writer
    finally:
        front.text.close()


async def test_the_drain_limit_cuts_what_still_runs() -> None:
    """Its handler is cancelled; idle connections are closed at once."""
    is_running, is_cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: HttpRequest, call: Call) -> Response:
        del request, call
        is_running.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise WorkerLost("it never ends")

    async with served(endless, drain_s=0.05) as (reader, writer):
        writer.write(LAST.replace(b"/health", b"/x"))
        await is_running.wait()
    assert is_cancelled.is_set()
    assert reader.at_eof() or await reader.read() == b""
    writer.close()


async def test_a_request_that_runs_when_the_listener_closes_is_its_connections_last() -> None:
    """Its answer says so, and nothing else is taken on it."""
    is_running, may_end = asyncio.Event(), asyncio.Event()

    async def slow(request: HttpRequest, call: Call) -> Response:
        del request, call
        is_running.set()
        await may_end.wait()
        return Response(200, b"whole", {})

    async with served(slow) as (reader, writer):
        writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        await is_running.wait()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
    ((status, headers, body),) = split(await reader.read())
    assert (status, headers["connection"], body) == (200, "close", b"whole")
    writer.close()


@pytest.mark.parametrize("is_stream", [False, True])
@virtual_time
async def test_an_answer_amid_a_drain_is_its_connections_last(is_stream: bool) -> None:
    """Its request came before; the client's next one finds another gateway by itself."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("the", gate=gate))
    async with memory_link(mesh) as link:
        link.say(with_length(b'{"prompt":"a","stream":%b}' % json.dumps(is_stream).encode()))
        await mesh.wait_running(1)
        mesh.is_draining = True
        gate.release()
        answer = await link.reader.read()
        assert now() == 0.0
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 200") == 1


async def test_a_client_that_ends_its_side_after_the_request_has_left() -> None:
    """So one that is gone looks, too, and nobody computes for it; what needs no worker is
    answered."""
    assert split(await asked(HEALTH, ends=True))[0][0] == 200
    mesh = ScriptedMesh(saying("the", gate=asyncio.Semaphore(0)))
    assert await asked(with_length(), mesh, ends=True) == b""
    await mesh.wait_running(0)
    assert len(mesh.requests) == 1
