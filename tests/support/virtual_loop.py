"""Virtual time: an asyncio loop whose clock jumps to the next timer instead of waiting for it.

Hours of protocol run in milliseconds, and two runs of one program are identical. If nothing is
ready, no timer is due ever, and no thread is at work, the program can never go on: the loop raises
Deadlock and names the tasks that wait, where a real loop would hang.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: a wait for a timer moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._inner = selectors.DefaultSelector()
        self.allows_waiting = False

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = self._inner.select(0)
        if ready:
            return ready
        if timeout is None:
            if self.allows_waiting:
                return self._inner.select(None)
            raise Deadlock
        self.now += max(0.0, timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> Any:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class _Timer(asyncio.TimerHandle):
    """Of equal times the one that was set first comes first, as bytes of one connection do."""

    number: int

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self.number) < (other.when(), other.number)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual and starts at 0; sockets and threads are not meant for it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._numbers = itertools.count()

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def time(self) -> float:
        return self._jumping.now

    def _run_once(self) -> None:
        # A timer is due within the clock's resolution. As fine as floats allow at this time of
        # day: coarser would merge timers, finer would never reach them.
        self._clock_resolution = max(1e-9, 4 * math.ulp(self.time()))
        try:
            super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        except Deadlock:
            waiting = [_place_of(task) for task in asyncio.all_tasks(self)]
            raise Deadlock(
                f"at {self.time():.6f} s nothing can happen any more; waiting:\n  "
                + "\n  ".join(sorted(waiting))
            ) from None

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._jumping.allows_waiting = True  # its thread wakes the loop through a socket
        await super().shutdown_default_executor()


def _place_of(task: asyncio.Task[Any]) -> str:
    """Return where a task waits: the innermost coroutines, outermost first."""
    places: list[str] = []
    awaited: Any = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        file = frame.f_code.co_filename.rpartition("/")[2]
        places.append(f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})")
        awaited = awaited.cr_await
    return f"{task.get_name()}: {' > '.join(places[-5:]) or 'done'}"


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int = 0) -> T:
    """Run ``main`` under virtual time to its end and return its result.

    seed: of the global ``random`` module, for libraries that use it. Raises Deadlock, and
    AssertionError if ``main`` leaves tasks behind.
    """
    random.seed(seed)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        left: list[str] = []

        async def watched() -> T:
            try:
                return await main
            finally:
                await asyncio.sleep(0)
                me = asyncio.current_task()
                left.extend(_place_of(t) for t in asyncio.all_tasks() if t is not me)

        result = runner.run(watched())
    assert not left, "tasks left behind:\n  " + "\n  ".join(sorted(left))
    return result


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test under virtual time: the same events in the same order, every time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run
