"""How late the event loop is: the one number that says whether heavy work has crept onto it.

Heartbeats come from the same loop, so a lag above the suspicion limit makes peers doubt this
process. A late timer is a sample: a loop that is blocked for 1 % of the time is late in 1 % of
them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from shared.telemetry.definitions import percentile

INTERVAL_S = 0.1
WINDOW_S = 60.0

BLOCKED_S = 1.0
"""A process whose loop was this late is not ready: it answers nobody in time."""


async def watch_loop_lag(
    observe: Callable[[float], None], stopwatch: Callable[[], float] = time.perf_counter
) -> NoReturn:
    """Report, every 0.1 s, by how many seconds a timer came late; runs until cancelled.

    stopwatch: not the loop's clock where time is real, for uvloop's counts whole milliseconds and
    stands still while callbacks run.
    """
    while True:
        due_at = stopwatch() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, stopwatch() - due_at))


class LagWindow:
    """The last observations, for readiness and for people."""

    def __init__(self, num_values: int = int(WINDOW_S / INTERVAL_S)) -> None:
        self._values: deque[float] = deque(maxlen=num_values)

    def add(self, lag_s: float) -> None:
        """Take one more observation in."""
        self._values.append(lag_s)

    @property
    def p99_s(self) -> float:
        """99th percentile over the window (one minute); 0 before the first observation."""
        return percentile(self._values, 99) if self._values else 0.0

    @property
    def last_s(self) -> float:
        """The newest observation; 0 before the first."""
        return self._values[-1] if self._values else 0.0

    @property
    def is_blocked(self) -> bool:
        """Whether the loop stood still for BLOCKED_S or longer when it was last looked at."""
        return self.last_s >= BLOCKED_S

    @property
    def not_ready_reason(self) -> str:
        """One sentence while the loop is blocked, else ''."""
        return f"the event loop stood still for {self.last_s:.1f} s" if self.is_blocked else ""
