"""Server-sent events of OpenAI-style streams, bytes in, payloads out. Pure.

Takes what servers send: ``\\n`` or ``\\r\\n``, with or without a space after ``data:``, comments,
several events in one read, one event in several. An event of several ``data:`` lines is not made by
any of these servers.
"""

from __future__ import annotations

MOST_LINE_BYTES = 8 << 20


class EventLines:
    """One stream; ``feed`` it what was read."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of all lines that are complete now.

        Raises ValueError: a line without an end.
        """
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise ValueError("a line of the stream does not end")
        # The space after the colon and a carriage return are left to the JSON reader.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
