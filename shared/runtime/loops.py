"""The background loops of a service: they run until it is told to stop, then it drains, then they
end. Knows no role: what runs and what draining means are arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from shared.errors import MeshError
from shared.runtime.groups import TaskGroup, plain_errors


def loop_time() -> float:
    """Return the running loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


async def serve_until_stopped(
    background: Sequence[Callable[[], Awaitable[object]]],
    *,
    stop: asyncio.Event,
    drain: Callable[[], Awaitable[bool]],
    last_words: Callable[[], Awaitable[object]],
) -> bool:
    """Run all loops until ``stop`` is set and ``drain`` is over; then cancel them, the first one
    first. Returns what ``drain`` did: False = its limit came before everything was done.

    A loop may not end: returning is a bug, raising ends all (and this call, with that error).
    last_words: awaited at the end, drained or failed, while the server still serves.
    """
    try:
        with plain_errors():
            async with TaskGroup() as tasks:
                loops = [tasks.create_task(_for_ever(loop)) for loop in background]
                await stop.wait()
                is_drained = await drain()
                await last_words()
                # A group waits for its tasks where nothing fails, and these never end by
                # themselves.
                for loop in loops:
                    loop.cancel()
        return is_drained
    except MeshError:
        await last_words()
        raise


async def _for_ever(loop: Callable[[], Awaitable[object]]) -> None:
    await loop()
    raise AssertionError(f"a background loop has ended: {loop!r}")
