"""How a thread calls an event loop: by a file descriptor that is written with the GIL let go.

``loop.call_soon_threadsafe`` writes the loop's own descriptor while it holds the GIL. Where thread
and loop share a core, the kernel gives it to the loop at once, which finds the GIL taken and sleeps
again: two changes of threads a call for nothing (bench/transfer/README.md has the figures).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable


class LoopBell:
    """One bell of one loop; many rings before it is heard are one. Made and closed on the loop.

    on_ring: called on the loop, at least once after every ``ring``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None]) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._fd, self._heard)

    def ring(self) -> None:
        """Have ``on_ring`` called soon, from any thread, but not after ``close``. On a loop that is
        closed nothing happens."""
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Nobody rings any more."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._on_ring()
