"""How a thread calls an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque

from shared.bell import LoopBell


async def test_no_ring_is_lost() -> None:
    """What a thread leaves before it rings is there when the loop hears it, however many rings it
    makes of them."""
    left: deque[int] = deque()
    taken: list[int] = []
    has_all = asyncio.Event()

    def take() -> None:
        while left:
            taken.append(left.popleft())
        if len(taken) == 10_000:
            has_all.set()

    bell = LoopBell(asyncio.get_running_loop(), take)

    def work() -> None:
        for number in range(10_000):
            left.append(number)
            bell.ring()

    thread = threading.Thread(target=work)
    thread.start()
    async with asyncio.timeout(30):
        await has_all.wait()
    thread.join()
    bell.close()
    assert taken == list(range(10_000))


async def test_a_closed_bell_leaves_no_descriptor() -> None:
    """Nor a reader of the loop's."""
    before = os.listdir("/proc/self/fd")
    loop = asyncio.get_running_loop()
    for _ in range(3):
        LoopBell(loop, lambda: None).close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_bell_outlives_its_loop() -> None:
    """A thread may ring once more than anybody listens."""

    async def make() -> LoopBell:
        return LoopBell(asyncio.get_running_loop(), lambda: None)

    asyncio.run(make()).ring()
