"""What the ends of a lane have in common, ours and the peers', whose interpreters have nothing of
pdmesh: an end says its address, hears the other's, and does what the parent orders line by line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_answers = 1


def keep_answers_apart() -> None:
    """Send what a library prints to standard error: standard output is for answers."""
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)


def say(answer: Any) -> None:
    os.write(_answers, (json.dumps(answer) + "\n").encode())


def pin(core: str) -> None:
    """Keep this process to a core; -1 = wherever the kernel likes."""
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})


def other_address(own: str) -> str:
    """Say our address, and return the other end's."""
    say(own)
    return json.loads(sys.stdin.readline())


def jobs() -> Iterator[dict[str, Any]]:
    """Yield what the parent orders, once it has heard that we know each other."""
    say("")
    for line in sys.stdin:
        yield json.loads(line)


def send(job: dict[str, Any], write: Callable[[int, int], None], lane: str) -> None:
    """Send a batch, or one message after the other, and say how long it took. write: messages of a
    size, so many; returns when the other end has them."""
    num_bytes, count = job["num_bytes"], job["count"]
    times: list[float] = []
    began_at = time.perf_counter()
    if job["is_latency"]:
        for _ in range(count):
            sent_at = time.perf_counter()
            write(num_bytes, 1)
            times.append(time.perf_counter() - sent_at)
    else:
        write(num_bytes, count)
    say({"seconds": time.perf_counter() - began_at, "each": times, "lane": lane})


def obey(
    buffer: Any, write: Callable[[int, int], None], lane: str, settle: Callable[[], None]
) -> None:
    """Send, or clear the buffer that the other end writes, and look at it afterwards. settle: waits
    until the buffer is as it was written here."""
    for job in jobs():
        own = buffer[: job["num_bytes"]]
        match job["end"]:
            case "receive":
                own[:] = 0
                settle()
                say("posted")
            case "check":
                say(bool(own.all()))
            case _:
                send(job, write, lane)
