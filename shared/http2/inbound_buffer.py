"""What has arrived on one stream and is not read yet: chunks in, messages out.

grpclib's own buffer wakes a queue and makes three objects for every read, and a message takes two
reads. Here a message that came whole in one chunk, as nearly all do, is cut out of it in one step
(``take_message``); all else is put together by ``read``. Bytes are acknowledged when somebody asks
for them, as in grpclib, so that flow control keeps the rest outside.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from grpclib.protocol import Buffer

from shared.messages.message_codec import PREFIX_BYTES


class InboundBuffer(Buffer):
    """One stream's; ``ack`` is told how many flow-controlled bytes were taken."""

    def __init__(self, ack: Callable[[int], None]) -> None:
        self._ack = ack
        self._eof = False
        self._arrived: deque[tuple[bytes, int]] = deque()  # with what each counts for
        self._taken: deque[bytes] = deque()  # acknowledged
        self._at = 0  # of the first one taken, so much is read
        self._taken_bytes = 0  # not read
        self._has_more = asyncio.Event()

    # --- what arrives -----------------------------------------------------------------------------

    def add(self, data: bytes, ack_size: int) -> None:
        """Add a chunk, not empty. ack_size: what it counts for, padding included."""
        self._arrived.append((data, ack_size))
        self._has_more.set()

    def eof(self) -> None:
        """Nothing follows."""
        self._eof = True
        self._has_more.set()

    def unacked_size(self) -> int:
        """Drop what was never taken, and return what it counts for."""
        size = sum(ack_size for _, ack_size in self._arrived)
        self._arrived.clear()
        return size

    # --- what is read -----------------------------------------------------------------------------

    def take_message(self, max_bytes: int) -> bytes | None:
        """Return the next message without its prefix if all of it lies in one chunk, else None.

        None, too, for one that must not be read so: compressed, or of more than ``max_bytes``.
        """
        taken = self._taken
        if not taken:
            if not self._arrived:
                return None
            self._take_chunk()
        # gRPC's prefix: a byte that says whether the message is compressed, then its length.
        chunk, begin = taken[0], self._at + PREFIX_BYTES
        if begin > len(chunk) or chunk[self._at]:
            return None
        num_bytes = int.from_bytes(chunk[begin - 4 : begin], "big")
        end = begin + num_bytes
        if end > len(chunk) or num_bytes > max_bytes:
            return None
        self._taken_bytes -= PREFIX_BYTES + num_bytes
        if end == len(chunk):
            taken.popleft()
            self._at = 0
        else:
            self._at = end
        return chunk[begin:end]

    async def read(self, size: int) -> bytes:
        """Return so many bytes, b'' at the end. A read that is cancelled takes nothing.

        Raises AssertionError, as grpclib's: the end came earlier.
        """
        while self._taken_bytes < size:
            if self._arrived:
                self._take_chunk()
            elif self._eof:
                break
            else:
                self._has_more.clear()
                await self._has_more.wait()
        if size and not self._taken_bytes:
            return b""
        if self._taken_bytes < size:
            raise AssertionError("the stream ended early")
        self._taken_bytes -= size
        parts: list[bytes] = []
        while size:
            chunk, begin = self._taken[0], self._at
            parts.append(chunk[begin : begin + size])
            size -= len(parts[-1])
            self._at += len(parts[-1])
            if self._at == len(chunk):
                self._taken.popleft()
                self._at = 0
        return b"".join(parts)

    def _take_chunk(self) -> None:
        data, ack_size = self._arrived.popleft()
        self._taken.append(data)
        self._taken_bytes += len(data)
        # Only now: what nobody has asked for keeps its part of the window, and so the peer from
        # sending more.
        self._ack(ack_size)
