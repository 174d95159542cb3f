"""Time as a heap of events, and random bytes that are none: what cores need instead of a loop."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from shared.errors import InvariantViolated

WIRE_S = 0.0005
"""How long a message is under way, if nothing else is said."""


class EventClock:
    """The event heap: equal times in the order in which they were asked for. wire_s: how long a
    message is under way."""

    def __init__(self, wire_s: float = WIRE_S) -> None:
        self.now = 0.0
        self.wire_s = wire_s
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        # Below all of ``_order``: an arrival is asked for when the one before it comes, and is as
        # early in its instant as if all had been asked for at the start.
        self._arrivals = itertools.count(-1 << 62)

    @property
    def next_at(self) -> float:
        """When the next event happens; endless if there is none."""
        return self._events[0][0] if self._events else math.inf

    def run_out(self) -> None:
        """Let everything happen."""
        self.run(lambda: not self._events, math.inf)

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Let it happen then, or at once if that is over."""
        at = when if when > self.now else self.now
        heapq.heappush(self._events, (at, next(self._order), happen))

    def arrive(self, when: float, happen: Callable[[], None]) -> None:
        """Let it happen then, before what else happens in that instant."""
        heapq.heappush(self._events, (max(when, self.now), next(self._arrivals), happen))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.at(self.now + seconds, happen)

    def send(self, happen: Callable[[], None]) -> None:
        """Let it happen where a message arrives that is sent now."""
        self.at(self.now + self.wire_s, happen)

    def run(self, until: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let events happen until this holds.

        Raises InvariantViolated: it does not within ``limit_s``, or nothing is left to happen.
        """
        give_up_at = self.now + limit_s
        while not until():
            if not self._events or self._events[0][0] > give_up_at:
                raise InvariantViolated(f"it did not come to that by {self.now:g} s")
            self.now, _, happen = heapq.heappop(self._events)
            self.num_events += 1
            happen()


def counted_bytes(seed: int) -> Callable[[int], bytes]:
    """Return what makes bytes that never repeat, and are the same in every run."""
    numbers = itertools.count((seed << 32) + 1)
    # What changes comes first: a short answer is cut where all are alike.
    return lambda num: next(numbers).to_bytes(16, "little")[:num].ljust(num, b"\0")


def counted_chances(seed: int) -> Iterator[float]:
    """Yield numbers in [0, 1) that look like chance (SplitMix64), the same in every run."""
    for state in itertools.count(seed + _STEP, _STEP):
        word = state & _MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        yield ((word ^ (word >> 31)) >> 11) / (1 << 53)


_STEP, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
