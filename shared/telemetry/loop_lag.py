"""How late the event loop is: the one number that says whether heavy work has crept onto it.

Heartbeats come from the same loop, so a lag above the suspicion limit makes peers doubt this
process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from shared.telemetry.definitions import percentile

INTERVAL_S = 0.25

BLOCKED_S = 1.0
"""A process whose loop was this late is not ready: it answers nobody in time."""


async def watch_loop_lag(observe: Callable[[float], None]) -> NoReturn:
    """Report, every 0.25 s, by how many seconds a timer came late; runs until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, loop.time() - due_at))


class LagWindow:
    """The last observations, for readiness and for people; its ``add`` is an ``observe``."""

    def __init__(self, num_values: int = 240) -> None:
        self._values: deque[float] = deque(maxlen=num_values)

    def add(self, lag_s: float) -> None:
        """Take one more observation in."""
        self._values.append(lag_s)

    @property
    def p99_s(self) -> float:
        """99th percentile over the window (one minute); 0 before the first observation."""
        return percentile(self._values, 99) if self._values else 0.0

    @property
    def is_blocked(self) -> bool:
        """Whether the loop stood still for BLOCKED_S or longer when it was last looked at."""
        return bool(self._values) and self._values[-1] >= BLOCKED_S
