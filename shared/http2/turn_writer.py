"""A transport that writes at most twice a turn of the loop: what comes first at once, and all that
follows in the same turn together at its end.

Every ``write`` of a transport is a system call, some 20 us with the receiver's half of TCP. A
session's stream carries the messages of all requests, of which many come in one turn when there is
much to do: then one call takes them all. When there is little to do the first message does not wait
for anything.
"""

from __future__ import annotations

import asyncio

WAITING_BYTES = 64 << 10
"""More than this is not held until the turn's end: the transport is to say when it is full."""


class TurnWriter:
    """What HTTP/2 needs of a transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._has_written = False
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        """Send bytes, in order, by the end of the turn."""
        if not self._has_written:
            self._has_written = True
            self._loop.call_soon(self._end_turn)
            self._transport.write(data)
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > WAITING_BYTES:
            self._flush()

    def close(self) -> None:
        """Close the connection when all is sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection now; what waits is not sent."""
        self._waiting.clear()
        self._transport.abort()

    def _end_turn(self) -> None:
        self._has_written = False
        self._flush()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            if not self._transport.is_closing():
                self._transport.write(b"".join(waiting))
