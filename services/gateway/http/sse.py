"""One server-sent event stream: headers and first token in one write, then one write a step, never
an unbounded buffer.

A client that stops reading stops us: once the socket's buffer is full, ``write`` waits, and
meanwhile its tokens wait in the mesh. After ``stall_s`` without a byte read the connection is cut.
Knows nothing of what the events say.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from services.gateway.http.stalls import keep_little_in_kernel, unless_stalled
from services.gateway.limits import STALL_S
from shared.errors import DeadlinePassed

BUFFER_BYTES = 64 << 10
"""Unsent bytes of one stream beyond which its writer waits; the kernel holds about as much
again."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Tells nginx and its kin not to collect events.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """The response to one request; it begins with the first ``write``."""

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], *, stall_s: float = STALL_S
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**headers, **_HEADERS})
        self._stall_s = stall_s
        self._transport: asyncio.Transport | None = None
        self._is_chunked = request.version >= HttpVersion11
        self._is_writing = False
        self.has_begun = False
        self.is_cut = False

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    # --- at once --------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether ``write_nowait`` may be called: the stream has begun, nobody waits to write, and
        the client reads."""
        transport = self._transport
        return (
            transport is not None
            and not self._is_writing
            and not transport.is_closing()
            and transport.get_write_buffer_size() < BUFFER_BYTES
        )

    def write_nowait(self, data: bytes) -> None:
        """Send complete events if there is room; they leave at the end of the loop's turn.

        Goes past aiohttp's writer straight to the transport, with the same framing: that is most
        of what a token costs there (bench/gateway/README.md).
        """
        assert self._transport is not None
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    # --- what may have to wait ------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Send complete events.

        Raises DeadlinePassed (code ``client_too_slow``): the client read nothing for ``stall_s``;
        the connection is cut.
        ConnectionError: the client has gone.
        """
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._is_writing = True
        try:
            if not self.has_begun:
                await self._begin(transport)
            has_room = transport.get_write_buffer_size() + len(data) < BUFFER_BYTES
            if has_room and not self._request.protocol.writing_paused:
                # Cannot wait, so needs no timer: this is nearly every write.
                await self._response.write(data)
            else:
                await unless_stalled(self._response.write(data), transport, self._stall_s)
        except TimeoutError:
            self._cut()
            raise DeadlinePassed(
                f"the client read nothing for {self._stall_s:g} s", code="client_too_slow"
            ) from None
        finally:
            self._is_writing = False

    async def _begin(self, transport: asyncio.Transport) -> None:
        self.has_begun = True
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        keep_little_in_kernel(transport, BUFFER_BYTES)
        if self._is_chunked:
            self._response.enable_chunked_encoding()
        # Only buffers the headers: they leave with the first events.
        await self._response.prepare(self._request)
        self._transport = transport

    async def end(self, data: bytes) -> None:
        """Send the last events and end the response; does nothing on a connection that was cut."""
        if self.is_cut:
            return
        await self.write(data)
        self._transport = None
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        try:
            await unless_stalled(self._response.write_eof(), transport, self._stall_s)
        except TimeoutError:
            self._cut()

    def _cut(self) -> None:
        self.is_cut = True
        self._transport = None
        if self._request.transport is not None:
            self._request.transport.abort()
