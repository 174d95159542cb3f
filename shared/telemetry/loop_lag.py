"""How late the event loop is: the one number that says whether heavy work has crept onto it.

Heartbeats come from the same loop, so a lag above the suspicion limit makes peers doubt this
process. A late timer is a sample: a loop that is blocked for 1 % of the time is late in 1 % of
them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

INTERVAL_S = 0.1

BLOCKED_S = 1.0
"""A process whose loop was this late is not ready: it answers nobody in time."""


async def watch_loop_lag(
    observe: Callable[[float], None],
    stopwatch: Callable[[], float] = time.perf_counter,
    interval_s: float = INTERVAL_S,
) -> NoReturn:
    """Report, every 0.1 s, by how many seconds a timer came late; runs until cancelled.

    stopwatch: not the loop's clock where time is real, for uvloop's counts whole milliseconds and
    stands still while callbacks run.
    """
    while True:
        due_at = stopwatch() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, stopwatch() - due_at))
