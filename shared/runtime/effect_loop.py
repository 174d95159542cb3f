"""Performs what a core orders, in order and one at a time, and ticks the core when it asked to be.

For shells of cores that answer every event with effects. Knows neither the core's events nor what
an effect means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

Effect = TypeVar("Effect")
Ordered = TypeVar("Ordered", covariant=True)


class TimedCore(Protocol[Ordered]):
    """A core with deadlines of its own."""

    @property
    def next_tick_at(self) -> float | None:
        """No deadline passes before this (loop time); None = there is none."""
        ...

    def tick(self, now: float) -> Sequence[Ordered]:
        """Look at the clock; harmless at any time."""
        ...


class EffectLoop(Generic[Effect]):
    """One core's effects. ``perform`` after every event; ``run`` for as long as it lives.

    tasks: for work that an effect begins; None = nothing may begin, as ``run`` does not run.
    """

    def __init__(self, core: TimedCore[Effect], do: Callable[[Effect], None]) -> None:
        """do: performs one effect; returns at once, may cause events."""
        self._core = core
        self._do = do
        self._todo: deque[Effect] = deque()
        self._is_performing = False
        self._clock_moved = asyncio.Event()
        self._tick_at: float | None = None
        self.tasks: asyncio.TaskGroup | None = None

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do all effects. One may cause an event at once: that event's effects wait for their
        turn."""
        self._todo.extend(effects)
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._is_performing = False
        due_at = self._core.next_tick_at
        if due_at is not None and (self._tick_at is None or due_at < self._tick_at):
            self._clock_moved.set()

    async def run(self) -> None:
        """Tick the core at each of its deadlines, until cancelled; then ``tasks`` are, too."""
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks
            try:
                await self._keep_time()
            finally:
                self.tasks = None

    async def _keep_time(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            # Read and cleared without a wait in between: a deadline that moves from now on sets it
            # again.
            self._tick_at = self._core.next_tick_at
            self._clock_moved.clear()
            try:
                async with asyncio.timeout_at(self._tick_at):
                    await self._clock_moved.wait()
            except TimeoutError:
                self.perform(self._core.tick(loop.time()))
