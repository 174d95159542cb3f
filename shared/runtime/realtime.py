"""Real-time priority for threads that wait most of the time: event loops, and those that carry KV.

Linux's fair scheduler lets whoever has a core finish its slice. A thread that wakes where all cores
are busy waits for the next tick, 4 ms on many kernels, however little it wants to do; niceness does
not change that. Under SCHED_RR it runs at once. What that is worth is in bench/loop_lag (p99 of the
loops' lag) and bench/handover (token 2), and docs/adr/0010 says why it has to be asked for.

Whatever such a thread starts has ordinary priority again: it is not inherited.
"""

from __future__ import annotations

import enum
import os
from concurrent.futures import ThreadPoolExecutor

from shared.errors import InvalidRequest


class RealTime(enum.IntEnum):
    """Priorities among ourselves. Loops come first: what they do is shorter than a copy, and
    clients wait for it."""

    CARRIER = 1
    LOOP = 2


def take(priority: RealTime) -> None:
    """Give the calling thread real-time priority, from now on.

    Raises InvalidRequest: this process may not have it.
    """
    policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
    try:
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    except OSError as error:
        raise InvalidRequest(
            f"--realtime: this process may not take real-time priority ({error.strerror}): give it "
            f"an rtprio limit of {max(RealTime):d} (ulimit -r, LimitRTPRIO=, docker's --ulimit "
            f"rtprio), or CAP_SYS_NICE",
            param="realtime",
        ) from error


def is_allowed() -> bool:
    """Whether this process may have real-time priority; tried on a thread, which then ends."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(take, max(RealTime)).exception() is None
