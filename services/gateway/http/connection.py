"""The HTTP listener: connections with limits, one request of each at a time, and its end.

A connection parses what arrives with aiohttp's parser (llhttp, and what aiohttp adds to it against
smuggled requests), answers its requests in order, one after the other, and is closed when it is
silent for too long. A client that leaves cancels its request at once. aiohttp's own server does
the same for twice the CPU of a small request (docs/adr/0013-http.md). Knows no route: requests go
to one function, and what that raises is its bug.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from services.gateway import limits
from services.gateway.http.followers import Followers
from services.gateway.http.messages import Response, bad_http, error_response, head_of, too_large
from services.gateway.http.stalls import keep_little_in_kernel, taken_of, unless_stalled
from shared.address import Address
from shared.errors import Overloaded, without_frames
from shared.listening import listen_at
from shared.rpc.tls import HANDSHAKE_WITHIN_S, HTTP, ServerTls
from shared.runtime.groups import TaskGroup, plain_errors

HEADER_TIMEOUT_S = 30.0
"""How long the headers of a request may take; also those of a connection's first one to begin."""
KEEPALIVE_S = 75.0
LINGER_S = 2.0
"""How long what a client still sends is drained after an early answer, so that it can read that."""

BUFFER_BYTES = 64 << 10
"""Unsent bytes of a response beyond which its writer waits; the kernel holds about as much
again."""

MAX_PIPELINED = 32
"""Requests that a client may send ahead; until some are answered nothing more is read of it."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log: Any = structlog.get_logger("gateway.http")


class BrokenBody(Exception):
    """The body is framed wrongly; raised where it is read."""


class HttpRequest:
    """One request. path: decoded, without the query. parameters: of its route's pattern.

    content_length: of the body as the client says it; 0 = there is none, or it does not say.
    is_last: the connection ends with its response. num_kept: bytes of its body; see ``keep``.
    """

    __slots__ = (
        "_body",
        "connection",
        "content_length",
        "headers",
        "is_answered",
        "is_http11",
        "is_last",
        "method",
        "num_kept",
        "parameters",
        "path",
    )

    def __init__(
        self, connection: Connection, message: RawRequestMessage, body: StreamReader
    ) -> None:
        self.connection = connection
        self.method = message.method
        self.path = message.url.path
        self.headers = message.headers
        self.parameters: Mapping[str, str] = {}
        self.is_http11 = message.version >= HttpVersion11
        # The parser has bounded the number, not its zeros: ``int`` takes 4,300 digits.
        self.content_length = int(self.headers.get("Content-Length", "").lstrip("0") or 0)
        # Of HTTP/1.0 chunks may be what a proxy took for the next request (RFC 9112, section 6.1).
        self.is_last = message.should_close or (message.chunked and not self.is_http11)
        # A body of 2**64 - 1 bytes is none to the parser, until some of it comes.
        self.is_last |= self.content_length > limits.MAX_BODY_BYTES
        self.is_answered = False
        self._body = body
        self.num_kept = 0

    @property
    def has_arrived(self) -> bool:
        """Whether the whole body is here."""
        return self._body.is_eof()

    async def read(self) -> bytes:
        """Return the body; a client that waits to be asked for it is asked.

        Raises TooLarge, InvalidRequest (its framing is wrong), Overloaded (see ``keep``).
        """
        body = self._body
        if self.content_length > limits.MAX_BODY_BYTES:
            raise too_large()
        if body.is_eof():
            return body.read_nowait()  # one read's worth at most: the connection pauses beyond
        if self.is_http11 and self.headers.get("Expect", "").lower() == "100-continue":
            self.connection.write(_CONTINUE)
        data = bytearray()
        try:
            while part := await body.readany():
                data += part
                self.keep(len(part))
                if len(data) > limits.MAX_BODY_BYTES:
                    raise too_large()
        except BrokenBody:
            raise bad_http() from None
        return bytes(data)

    def keep(self, num_bytes: int) -> None:
        """Count bytes of its body, which stay until it is answered.

        Raises Overloaded: those of all requests together are too many.
        """
        listener = self.connection.listener
        self.num_kept += num_bytes
        listener.num_kept_bytes += num_bytes
        if listener.num_kept_bytes > limits.MAX_BODIES_BYTES:
            raise Overloaded("too many large requests at once", retry_after_s=1.0)

    async def drop_body(self) -> None:
        """Read what is left of the body, for nobody."""
        while await self._body.readany():
            pass


Handler = Callable[[HttpRequest], Awaitable[Response | None]]
"""Answers a request; None = it has written the response itself (``EventStream``)."""

HeadersFor = Callable[[HttpRequest], Mapping[str, str]]
"""Headers that every response to a request has, whoever makes it."""


@dataclass(slots=True)
class _Listener:
    """What the connections of one listener have in common."""

    handler: Handler
    headers_for: HeadersFor | None
    is_draining: Callable[[], bool]
    tasks: asyncio.TaskGroup
    connections: set[Connection] = field(default_factory=lambda: set())
    idle: dict[Connection, None] = field(default_factory=lambda: {})  # longest first
    num_kept_bytes: int = 0
    is_closing: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self.is_closing and not self.connections:
            self.has_ended.set()

    async def close(self, drain_s: float) -> None:
        """Close what is idle, wait for running requests, and cut those that take longer."""
        self.is_closing = True
        for connection in list(self.idle):
            connection.end()
        if not self.connections:
            return
        try:
            async with asyncio.timeout(drain_s):
                await self.has_ended.wait()
        except TimeoutError:
            pass
        finally:
            for connection in list(self.connections):
                connection.abort()


class Connection(BaseProtocol):
    """One client. A request is answered by a task, which goes on as long as more have arrived."""

    def __init__(self, listener: _Listener, loop: asyncio.AbstractEventLoop) -> None:
        self._requests: HttpRequestParser | None = HttpRequestParser(
            self,
            loop,
            BUFFER_BYTES,
            max_line_size=limits.MAX_HEADER_LINE_BYTES,
            max_field_size=limits.MAX_HEADER_LINE_BYTES,
            max_headers=limits.MAX_HEADERS,
            payload_exception=BrokenBody,
            auto_decompress=False,
            max_msg_queue_size=MAX_PIPELINED,
        )
        super().__init__(loop, self._requests)
        self.listener = listener
        self._waiting: deque[tuple[RawRequestMessage, StreamReader]] = deque()
        self._followers = Followers()
        self._last_body: StreamReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False  # nothing more is read as a request
        self._is_broken = False  # likewise, for it is no HTTP
        self._has_asked = False
        self._head_since: float | None = None
        self._idle_since = loop.time()
        self._watch: asyncio.TimerHandle | None = None

    # --- what the transport tells ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        listener = self.listener
        if len(listener.connections) >= limits.MAX_CONNECTIONS and listener.idle:
            # Heads that never end would lock everybody out.
            longest_idle = next(iter(listener.idle))
            listener.forget(longest_idle)
            longest_idle.abort()
        if listener.is_closing or len(listener.connections) >= limits.MAX_CONNECTIONS:
            # Before any byte is read: an answer would cost what the limit is there to save.
            self.abort()
            return
        listener.connections.add(self)
        listener.idle[self] = None
        self._call_at(self._idle_since + HEADER_TIMEOUT_S, self._look)

    def data_received(self, data: bytes) -> None:
        body = self._last_body
        is_of_body = body is not None and not body.is_eof() and body.exception() is None
        if self._requests is None or (self._is_over and not is_of_body):
            return
        try:
            messages, is_upgraded, _ = self._requests.feed_data(data)
        except HttpProcessingError:
            self._is_over = self._is_broken = True
            if body is not None and not body.is_eof():
                body.set_exception(BrokenBody())  # of the request that is being answered
            messages, is_upgraded = (), False
        if self._is_over and not self._is_broken:
            return  # of the last request the end of its body is waited for (``_linger``)
        is_full = len(self._waiting) + len(messages) >= MAX_PIPELINED
        messages, is_end = self._followers.cut(messages, data, is_full=is_full)
        if messages:
            self._head_since = None
            self._waiting.extend(messages)
            self._last_body = messages[-1][1]
            if is_full and not self._buffer_paused:
                self._pause_reading_for_buffer()
        elif data and not is_of_body and self._head_since is None:
            self._head_since = self._loop.time()
            self._call_at(self._head_since + HEADER_TIMEOUT_S, self._look)
        if is_upgraded or is_end:
            self._is_over = True  # the answer says so
        if self._task is None and (self._waiting or self._is_broken):
            self.listener.idle.pop(self, None)
            self._task = self.listener.tasks.create_task(self._serve())

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # aiohttp's bodies call it with every read
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._is_over = True
        self.listener.forget(self)
        if self._watch is not None:
            self._watch.cancel()
        # What knows this connection, too: only the garbage collector would free them.
        if self._last_body is not None and (broken := self._last_body.exception()) is not None:
            without_frames(broken)
        self._requests = self._parser = self._last_body = None
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    # --- requests -------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while self._waiting:
                message, body = self._waiting.popleft()
                if message.version not in ((1, 0), (1, 1)):
                    # The parser also takes 0.9, which says no version, and 2.0.
                    self._is_over = self._is_broken = True
                    break
                request = HttpRequest(self, message, body)
                self._has_asked = True
                if self._requests is not None:
                    self._requests.message_consumed()
                if self._buffer_paused and len(self._waiting) <= MAX_PIPELINED // 2:
                    self._read_on()
                try:
                    response = await self.listener.handler(request)
                finally:
                    self.listener.num_kept_bytes -= request.num_kept
                if response is not None:
                    await self.send(request, response)
                elif not request.is_answered:
                    self.abort()  # half a response must not look like a whole one
                # Closing on unread bytes resets the connection, and the answer may be lost.
                if not request.has_arrived:
                    await self._linger(request)
                if request.is_last:
                    return
            if self._is_broken:
                await self._complain()
        except ConnectionError:
            self.abort()
        except Exception as failure:
            log.error("internal error outside a route", exc_info=failure)
            self.abort()
        finally:
            # Nothing was awaited since the look for another request.
            self._task = None
            self._idle_since = self._loop.time()
            if self._is_over or self.listener.is_closing or self._waiting:
                self.end()
            else:
                self.listener.idle[self] = None

    def _read_on(self) -> None:
        self._buffer_paused = False
        self.data_received(b"")  # the parser has kept what came after the last request
        if not self._buffer_paused:
            self._resume_reading_for_buffer()

    async def _linger(self, request: HttpRequest) -> None:
        """Wait for the end of its body, or of the connection, whichever comes first."""
        request.is_last = self._is_over = True
        try:
            async with asyncio.timeout(LINGER_S):
                await request.drop_body()
        except (TimeoutError, BrokenBody):
            pass

    async def _complain(self) -> None:
        response = error_response(bad_http(), status=400)
        framing = {"Content-Length": str(len(response.body)), "Connection": "close"}
        self.write(head_of(response.status, {**response.headers, **framing}) + response.body)
        if (transport := self.transport) is not None and transport.can_write_eof():  # not in TLS
            transport.write_eof()
        # Until the client leaves: what it still sends is dropped, for the same reason.
        await asyncio.sleep(LINGER_S)

    # --- responses ------------------------------------------------------------------------------

    def head(self, request: HttpRequest, status: int, headers: Mapping[str, str]) -> bytes:
        """Return the head of a response, with what its connection and its origin ask for."""
        whole = dict(headers)
        listener = self.listener
        # After an answer to what has not all arrived the connection is closed (``_linger``).
        is_last = not request.has_arrived or "Connection" in whole
        # If what follows is no HTTP, that is told in a response of its own (``_complain``).
        is_last |= self._is_over and not self._is_broken and not self._waiting
        if is_last or listener.is_closing or listener.is_draining():
            request.is_last = True
        if request.is_last:
            self._is_over = True
            whole["Connection"] = "close"
        elif not request.is_http11:
            whole["Connection"] = "keep-alive"
        if listener.headers_for is not None:
            whole |= listener.headers_for(request)
        return head_of(status, whole)

    async def send(self, request: HttpRequest, response: Response) -> None:
        """Send a whole response. Raises ConnectionError: the client has gone."""
        status, body, headers = response
        headers = dict(headers)
        if status not in (204, 304):
            headers["Content-Length"] = str(len(body))
        head = self.head(request, status, headers)
        if len(body) > BUFFER_BYTES and self.transport is not None:
            keep_little_in_kernel(self.transport, BUFFER_BYTES)
        self.write(head if request.method == "HEAD" else head + body)
        if self.writing_paused:
            try:
                await self.drained(limits.STALL_S)
            except TimeoutError:
                self.abort()

    def write(self, data: bytes) -> None:
        """Write, now. Raises ConnectionError: the client has gone."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self.transport.write(data)

    async def drained(self, stall_s: float) -> None:
        """Wait until the client has read most of what was written.

        Raises TimeoutError: nothing for ``stall_s``. ConnectionError: it has gone.
        """
        if self.writing_paused and self.transport is not None:
            await unless_stalled(self._drain_helper(), self.transport, stall_s)

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Close, once what was written has left; a client that reads nothing of it is cut."""
        self._is_over = True
        transport = self.transport
        if transport is not None and not transport.is_closing():
            if transport.get_write_buffer_size():
                self._cut_if_stalled()
            transport.close()

    def _cut_if_stalled(self, before: tuple[int, int] | None = None) -> None:
        """before: what the client had taken when somebody looked last."""
        if (transport := self.transport) is None:
            return
        if (now := taken_of(transport)) == before:
            self.abort()
        else:
            self._call_at(self._loop.time() + limits.STALL_S, partial(self._cut_if_stalled, now))

    def abort(self) -> None:
        self._is_over = True
        if self.transport is not None:
            self.transport.abort()

    def _look(self) -> None:
        """Close if the client has been silent for too long."""
        now = self._loop.time()
        if self._task is not None:
            give_up_at = now + HEADER_TIMEOUT_S
        elif self._head_since is not None:
            give_up_at = max(self._head_since, self._idle_since) + HEADER_TIMEOUT_S
        else:
            give_up_at = self._idle_since + HEADER_TIMEOUT_S
            if now >= give_up_at and self._has_asked and not self._has_begun_another():
                give_up_at = self._idle_since + KEEPALIVE_S
        if now < give_up_at:
            self._call_at(give_up_at, self._look)
        else:
            self.end()

    def _has_begun_another(self) -> bool:
        """Whether a head has begun in one piece with the request before it, which nothing else
        tells. If so, the parser is of no use any more."""
        try:
            return self._requests is not None and self._requests.feed_eof() is not None
        except HttpProcessingError:
            return True

    def _call_at(self, when: float, act: Callable[[], None]) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_at(when, act)


@asynccontextmanager
async def listen(
    handler: Handler,
    address: Address,
    *,
    headers_for: HeadersFor | None = None,
    is_draining: Callable[[], bool] = lambda: False,
    own_port: int = 0,
    drain_s: float = 30.0,
    reuse_port: bool = False,
    tls: ServerTls | None = None,
) -> AsyncGenerator[Address]:
    """Serve until the block ends, then wait at most ``drain_s`` for running requests and cancel the
    rest.

    Yields the address, with the real port if 0 was asked for. is_draining: whether this process
    ends soon, so that each answer is its connection's last. reuse_port: other processes may
    listen there, too; the kernel deals connections out. own_port: a second port, which stays this
    process's own, 0 = none. A client that disconnects cancels its
    handler at once. Raises OSError: the port is in use. InvalidRequest: a file of ``tls`` is
    unusable.
    """
    loop = asyncio.get_running_loop()
    with plain_errors():
        async with TaskGroup() as tasks:
            listener = _Listener(handler, headers_for, is_draining, tasks)
            listen_on = partial(
                listen_at,
                lambda: Connection(listener, loop),
                address.host,
                ssl=tls and tls.context(HTTP),
                ssl_handshake_timeout=tls and HANDSHAKE_WITHIN_S,
            )
            servers = [await listen_on(address.port, reuse_port=reuse_port or None)]
            try:
                if own_port:
                    servers.append(await listen_on(own_port))
                yield Address(address.host, servers[0].sockets[0].getsockname()[1])
            finally:
                for server in servers:
                    server.close()
                await listener.close(drain_s)
