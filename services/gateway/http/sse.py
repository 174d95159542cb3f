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

from services.gateway.http.connection import BUFFER_BYTES, HttpRequest
from services.gateway.http.stalls import keep_little_in_kernel
from services.gateway.limits import STALL_S
from shared.errors import DeadlinePassed

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Tells nginx and its kin not to collect events.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """The response to one request; it begins with the first ``write``."""

    def __init__(
        self, request: HttpRequest, headers: Mapping[str, str], *, stall_s: float = STALL_S
    ) -> None:
        self._request = request
        self._headers = headers
        self._stall_s = stall_s
        self._transport: asyncio.Transport | None = None
        self._is_chunked = request.is_http11
        self._is_writing = False
        self.has_begun = False
        self.is_cut = False

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
        """Send complete events if there is room; they leave at the end of the loop's turn."""
        assert self._transport is not None
        self._transport.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    # --- what may have to wait ------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Send complete events.

        Raises DeadlinePassed (code ``client_too_slow``): the client read nothing for ``stall_s``;
        the connection is cut.
        ConnectionError: the client has gone.
        """
        await self._write(self._framed(data))

    async def end(self, data: bytes) -> None:
        """Send the last events and end the response; does nothing on a connection that was cut."""
        if self.is_cut:
            return
        data = self._framed(data)
        await self._write(data + b"0\r\n\r\n" if self._is_chunked else data)
        self._transport = None
        self._request.is_answered = True

    async def _write(self, data: bytes) -> None:
        connection = self._request.connection
        self._is_writing = True
        try:
            connection.write(data if self.has_begun else self._begin() + data)
            await connection.drained(self._stall_s)
        except TimeoutError:
            self.is_cut = True
            self._transport = None
            connection.abort()
            raise DeadlinePassed(
                f"the client read nothing for {self._stall_s:g} s", code="client_too_slow"
            ) from None
        finally:
            self._is_writing = False

    def _begin(self) -> bytes:
        """Return the head, which leaves with the first events."""
        request, connection = self._request, self._request.connection
        headers = {**self._headers, **_HEADERS}
        if self._is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            request.is_last = True  # where it ends, the connection's end tells
        head = connection.head(request, 200, headers)
        if (transport := connection.transport) is not None:
            transport.set_write_buffer_limits(high=BUFFER_BYTES)
            keep_little_in_kernel(transport, BUFFER_BYTES)
        self.has_begun = True
        self._transport = transport
        return head
