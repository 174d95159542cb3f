"""Where a connection must end, because the parser mixes up requests that follow one another.

Two faults of aiohttp's parser (3.14), told by the bytes alone; ``connection.py`` asks with every
read. Behind a request that may have met one nothing is taken, and its answer closes the connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

Messages = Sequence[tuple[RawRequestMessage, StreamReader]]

_NO_TRAILER = b"\r\n0\r\n\r\n"


class Followers:
    """Cuts the requests of one connection's reads behind the last that may be answered.

    The last line of a chunked body's trailer becomes a header of the next request, which may be
    somebody else's where a proxy has one connection for many: only a body that ends without a
    trailer, as the last of its read, may be followed. Of what comes behind a request for a protocol
    that it does not know, as Java's client makes each (``Upgrade: h2c``), it drops what came in the
    same read.
    """

    def __init__(self) -> None:
        self._chunked: StreamReader | None = None  # which has not ended
        self._is_upgrade = False  # its request asks for another protocol
        self._end = b""  # of what has come of it

    def cut(self, messages: Messages, data: bytes, *, is_full: bool) -> tuple[Messages, bool]:
        """Return those that may be answered, and whether the connection ends with them.

        is_full: so many wait that the parser may keep bytes of this read for later.
        """
        if self._chunked is not None:
            seen = self._end + data
            self._end = seen[-len(_NO_TRAILER) :]
            if not self._chunked.is_eof():
                return messages, False
            self._chunked = None
            is_lost = self._is_upgrade and seen.count(b"\r\n\r\n") > 1
            if messages or is_full or is_lost or self._end != _NO_TRAILER:
                return (), True
        for num, (message, body) in enumerate(messages, 1):
            if not message.chunked:
                continue
            if not body.is_eof():
                self._chunked, self._is_upgrade = body, message.upgrade
                self._end = data[-len(_NO_TRAILER) :]
            elif num < len(messages) or is_full or not data.endswith(_NO_TRAILER):
                return messages[:num], True
        return messages, bool(messages) and _is_lost(messages[-1], data)


def _is_lost(last: tuple[RawRequestMessage, StreamReader], data: bytes) -> bool:
    """Whether something came behind a request for another protocol."""
    message, body = last
    if not (message.upgrade and body.is_eof()):
        return False
    rest = data[data.find(b"\r\n\r\n") + 4 :]
    return (rest.find(b"\r\n\r\n") + 4 if message.chunked else body.total_bytes) < len(rest)
