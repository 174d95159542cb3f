"""How long the pump may sleep while messages are on their way: wake-ups can be lost.

UCX's shared memory lanes wake a sleeping receiver through an abstract unix socket, and those end
at a network namespace: between containers that share IPC but not the network, memory crosses and
no signal ever comes (a transfer then waits for UCX's next keepalive: a second or more). So a pump
that waits for something looks again after a while even if nothing woke it. Where signals do come,
the looks get rare quickly; where a look finds what no signal announced, they stay frequent.

Pure: times and events are arguments.
"""

from __future__ import annotations

from typing import Final

SHORTEST_MS: Final = 1
LONGEST_MS: Final = 64

_MISSED_WEIGHT: Final = 4
"""One missed signal outweighs as many that came: tcp's come even where shared memory's do not."""

_MOST_MISSED: Final = 64


class Nap:
    """The pump's patience. Idle (nothing in flight) it may sleep for ever; that is not asked
    here."""

    def __init__(self) -> None:
        self._limit_ms = SHORTEST_MS
        self._missed = 0

    @property
    def limit_ms(self) -> int:
        """How long to sleep at most, with something in flight."""
        return SHORTEST_MS if self._missed else self._limit_ms

    def signalled(self) -> None:
        """UCX woke the pump."""
        self._missed = max(0, self._missed - 1)
        self._limit_ms = SHORTEST_MS

    def timed_out(self, *, found_work: bool) -> None:
        """Nothing woke the pump; found_work: yet there was something to do for UCX."""
        if found_work:
            self._missed = min(_MOST_MISSED, self._missed + _MISSED_WEIGHT)
            self._limit_ms = SHORTEST_MS
        else:
            self._limit_ms = min(LONGEST_MS, 2 * self._limit_ms)
