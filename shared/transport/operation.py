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

    __slots__ = ("_outcome", "_waiters", "error")

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._waiters: list[asyncio.Future[Outcome]] | None = None
        self.error = ""

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    async def settled(self) -> Outcome:
        """Wait until settled; returns at once, without a turn of the loop, if it already is."""
        if self._outcome is not None:
            return self._outcome
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = [waiter]
        else:
            self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            if self._outcome is None and self._waiters is not None:
                self._waiters.remove(waiter)  # our wait was cancelled; the operation goes on

    def settle(self, outcome: Outcome, error: str = "") -> None:
        """Give the buffer back, or keep it for ever. Only the transport calls this, on the loop,
        once."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        self.error = error
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(outcome)
            self._waiters = None

    def __repr__(self) -> str:
        state = self._outcome.value if self._outcome is not None else "in flight"
        return f"<{type(self).__name__} {state}{': ' + self.error if self.error else ''}>"


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
