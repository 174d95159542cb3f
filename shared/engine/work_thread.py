"""One thread that does work for an event loop, in order, and nothing more.

An executor of one thread does the same; its futures, locks and counters cost every step and every
copy there and back 30 to 120 us more (3 ms of work, CPU: 120 to 190 us instead of 144 to 260, and
63 to 99 us of CPU time instead of 94 to 290).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_Work = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class OrderedWork(Protocol):
    """What does work in order, beside the loop: ``WorkThread``, or its twin for virtual time."""

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]: ...

    def end(self) -> None: ...


class WorkThread:
    """Starts with its first work. ``run`` is for a loop's thread, ``close`` for any."""

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        """prepare: called on the thread before all work, which fails with what it raises."""
        self._name = name
        self._prepare = prepare
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have ``work`` run after all earlier work; the future gets its result or its error.

        Cancelling the future does not keep it from running. Raises RuntimeError: closed.
        """
        if self._is_closed:
            raise RuntimeError(f"{self._name} is closed")
        if self._thread is None:
            # A daemon: whoever does not close it must not keep the process from ending.
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put((loop, future, work))
        return future

    def end(self) -> None:
        """Let the thread end when all work is done, and wait for nothing."""
        self._is_closed = True
        self._queue.put(None)

    def close(self) -> None:
        """Wait until all work is done and the thread has ended."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        unprepared = None
        try:
            self._prepare()
        except BaseException as raised:
            unprepared = raised
        while (item := self._queue.get()) is not None:
            loop, future, work = item
            result, error = None, None
            try:
                if unprepared is not None:  # told to who waits: a dead thread would tell nobody
                    raise unprepared
                result = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)
            # What the work held, memory of other processes too, must not wait for the next work.
            del item, loop, future, work, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # its wait was cancelled
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # no future takes it
        future.set_exception(RuntimeError("work raised StopIteration"))
    else:
        future.set_exception(error)


async def run_and_end(name: str, work: Callable[[], T]) -> T:
    """Run ``work`` on a thread that ends with it, and return its result or raise its error.

    Who loads an engine does so here: a thread that has computed keeps its team of helpers for as
    long as it lives. OpenMP (torch, vLLM) has all teams sleep between two loops once they are more
    threads than cores: one beside the compute thread's cost vLLM's decode step of 8 ms 4 more (CPU,
    2 cores).
    Cancelling this wait does not end ``work``.
    """
    thread = WorkThread(name)
    try:
        result = await thread.run(work)
    except BaseException:
        thread.end()
        raise
    thread.close()
    return result
