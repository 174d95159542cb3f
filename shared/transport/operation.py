"""What all transports share: an operation's life on the event loop, and the checks every buffer
passes.

An operation settles exactly once, on the loop, and only when the transport has given its buffer
back, or has said that it never will (ABANDONED). This module knows no wire: ``ucxx.py`` and the
tests' ``loopback.py`` decide when that is.
"""

from __future__ import annotations

import asyncio

from shared.errors import LocalProtocolError
from shared.transport.base import Outcome


class PendingOperation:
    """The loop's side of a send or receive. Made, settled and awaited on one loop; never on another
    thread."""

    __slots__ = ("_is_settled", "error", "outcome")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.error = ""
        self._is_settled = asyncio.Event()

    async def settled(self) -> Outcome:
        """Wait until settled; returns at once, without a turn of the loop, if it already is."""
        await self._is_settled.wait()
        assert self.outcome is not None
        return self.outcome

    def settle(self, outcome: Outcome, error: str = "") -> None:
        """Give the buffer back, or keep it for ever. Only the transport calls this, on the loop,
        once."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
            self._is_settled.set()


def require_usable(
    *, is_contiguous: bool, is_readonly: bool, buffer_bytes: int, num_bytes: int, writes: bool
) -> None:
    """Refuse a buffer that the wire would misread or overrun.

    Raises LocalProtocolError: strided, read-only for a receive, or shorter than ``num_bytes``. UCX
    checks none of
    these: it would send wrong bytes, or write into constants.
    """
    if not is_contiguous:
        raise LocalProtocolError("a transfer buffer must be contiguous")
    if writes and is_readonly:
        raise LocalProtocolError("a receive buffer must be writable")
    if not 0 <= num_bytes <= buffer_bytes:
        raise LocalProtocolError(
            f"{num_bytes} bytes do not fit a transfer buffer of {buffer_bytes} bytes"
        )


def require_tag(tag: int) -> None:
    """Raise LocalProtocolError unless the tag is an unsigned 64-bit number."""
    if not 0 <= tag < 1 << 64:
        raise LocalProtocolError("a tag is an unsigned 64-bit number")
