"""The compute runner: how the event loop runs an engine without ever waiting in it.

``ThreadCompute`` is production: one named thread for steps, one for copies (gather, scatter,
digests), which run beside the steps; torch releases the GIL inside kernels, so the loop stays free
for I/O. Its twin for virtual time is ``tests/support/virtual_compute.py``.

This module knows no request, no block and no transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from shared.engine.base import Engine, Launch, QueuedStep
from shared.engine.work_thread import WorkThread
from shared.errors import EngineFailed, LocalProtocolError, MeshError
from shared.step import RowResult, StepRow, ToCome

T = TypeVar("T")

COMPUTE_NICENESS = 5
"""Of compute threads, where loops have 0; bench/loop_lag measured the difference."""

LOOK_S = 500e-6
"""How often the compute thread looks whether the step that it waits for is ending while no other
one follows."""

OnLayersDone = Callable[[int], None]
"""Called on the loop with n: KV of layers [0, n) of the running step is written, or queued on a
device (``gather`` waits for it). n grows within a step, several layers may come in one call, and
the last call (n = all layers) comes before ``step`` returns."""


class StepDone(NamedTuple):
    """When the parts of a step were done, on the device and not when the loop heard of it; loop
    time. layers_at: KV of each layer was written. step_at: the results were there."""

    layers_at: Sequence[float] = ()
    step_at: float = 0.0


class BegunStep(Protocol):
    """A step that a compute runner has taken: it runs, or waits for the one before it.

    seconds: how long it took, once it has ended. done: when its parts were, if its layers were
    followed.
    """

    seconds: float
    done: StepDone

    async def results(self) -> list[RowResult]:
        """Wait for the results, in row order; once.

        Cancelling this wait does not end the step: ``ComputeRunner.close`` waits for it.
        Raises EngineFailed: whatever the engine raised; the process should end.
        """
        ...

    def withdraw(self) -> bool:
        """Keep it from running; False: it has begun, and its results will come."""
        ...


class ComputeRunner(Protocol):
    """Runs one engine for one event loop, its steps one after the other."""

    def begin(
        self,
        rows: Sequence[StepRow],
        to_come: ToCome = (),
        on_layers_done: OnLayersDone | None = None,
    ) -> BegunStep:
        """Take a step and return at once; it runs as soon as the one taken before it has ended,
        without waiting for the loop, and at most one may wait so.

        to_come: tokens that its rows lack, taken from the results of that step.
        """
        ...

    async def copy(self, work: Callable[[], T]) -> T:
        """Run ``work`` beside the steps, after all earlier copies; return its result or raise its
        error.

        Cancelling this wait does not end ``work``: whoever owns its buffers must shield the wait.
        """
        ...

    async def close(self) -> None:
        """Wait until no step and no copy runs, then free the threads. The engine itself is the
        caller's to close.
        """
        ...


ComputeFactory = Callable[[Engine], ComputeRunner]


class ThreadCompute:
    """One compute thread and one copy thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "pdmesh",
        enter_copies: Callable[[], None] = lambda: None,
    ) -> None:
        """Start no thread yet: each starts with its first work.

        name: prefix of both threads' names, as py-spy and top show them. enter_copies: called on
        the copy thread before its first work.
        """
        self._engine = engine
        self._num_layers = engine.layout.num_layers
        self._steps = WorkThread(f"{name}-compute", _yield_to_loops)
        self._copies = WorkThread(f"{name}-copy", enter_copies)
        # The loop's word to the compute thread: the step taken last, unless that runs.
        self._following: _ThreadStep | None = None
        self._has_following = threading.Event()
        # The compute thread's.
        self._last: list[RowResult] = []
        self._last_at = 0.0
        self._has_failed = False

    def begin(
        self,
        rows: Sequence[StepRow],
        to_come: ToCome = (),
        on_layers_done: OnLayersDone | None = None,
    ) -> BegunStep:
        reports, on_layer = None, None
        if on_layers_done is not None:
            reports = _LayerReports(asyncio.get_running_loop(), self._num_layers, on_layers_done)
            on_layer = reports.written
        step = _ThreadStep(rows, to_come, reports)

        def run() -> list[RowResult]:
            if step.queued is None and not step.claim():
                return []  # withdrawn: nobody waits
            # This one was begun before anybody could be told.
            if self._has_failed:
                raise EngineFailed("the step before this one failed")
            self._has_failed = True  # until it has not
            fill_in(to_come, self._last)
            # One that was queued behind the last begins when that ends.
            began_at = self._last_at if step.queued is not None else time.perf_counter()
            # Queued and not run, where it can be: then the next one can be queued behind it.
            if step.queued is None and on_layer is None:
                launch = self._engine.prepare(rows)
                step.queued = None if launch is None else launch()
            if step.queued is None:
                self._last = self._engine.step(rows, on_layer)
            else:
                self._queue_following(step.queued)
                self._last = step.queued.results()
            self._last_at = time.perf_counter()
            step.seconds = self._last_at - began_at
            if reports is not None:
                layers_at = self._engine.layer_times() or reports.layers_at
                step.done = StepDone(layers_at, time.monotonic())  # the loop's clock
            self._has_failed = False
            return self._last

        step.outcome = self._steps.run(run)
        step.outcome.add_done_callback(_look_at)
        # One whose layers are followed is run in its turn: what is queued tells of none.
        self._following = None if on_layer is not None else step
        self._has_following.set()
        return step

    def _queue_following(self, running: QueuedStep) -> None:
        """Queue the step that follows the running one as that ends, if it can be queued: so late,
        because until then it may be withdrawn for one that has more rows. Compute thread only."""
        looked_at: _ThreadStep | None = None
        while True:
            # Before it is looked at: one that comes meanwhile sets it again.
            self._has_following.clear()
            following = self._following
            if following is not None and following is not looked_at and following.queued is None:
                looked_at = following
                launch = self._prepare(following)
                if launch is not None:
                    running.wait_until_ending()
                    if following.claim():
                        following.queued = launch()
                        return
                continue
            if running.is_ending():
                return
            self._has_following.wait(LOOK_S)

    def _prepare(self, step: _ThreadStep) -> Launch | None:
        try:
            return self._engine.prepare(step.rows, step.to_come)
        except LocalProtocolError:
            return None  # whoever waits for it hears of it when it is its turn

    async def copy(self, work: Callable[[], T]) -> T:
        return await self._copies.run(work)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._steps.close)
        await loop.run_in_executor(None, self._copies.close)


def fill_in(to_come: ToCome, last: Sequence[RowResult]) -> None:
    """Give rows the tokens that they lacked when they were planned."""
    for token_ids, source in to_come:
        token_ids[0] = last[source].token_id


def _yield_to_loops() -> None:
    """Let event loops have a core before this thread, and the threads that it will start: a step
    that is a little later harms nobody, a loop that is late holds up every stream."""
    with contextlib.suppress(OSError):  # a thread may always be nicer; some systems know none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICENESS)


class _ThreadStep:
    """See BegunStep. queued: it is in the device's queue already, behind the one before it."""

    outcome: asyncio.Future[list[RowResult]]

    def __init__(
        self, rows: Sequence[StepRow], to_come: ToCome, reports: _LayerReports | None
    ) -> None:
        self.rows = rows
        self.to_come = to_come
        self.seconds = 0.0
        self.done = StepDone()
        self.queued: QueuedStep | None = None
        self._reports = reports
        self._decided = threading.Lock()

    def claim(self) -> bool:
        """Decide whether the step runs, on any thread; only who asks first may."""
        return self._decided.acquire(blocking=False)

    async def results(self) -> list[RowResult]:
        try:
            results = await self.outcome
        except MeshError:
            raise
        except Exception as error:
            raise engine_failed(error) from error
        if self._reports is not None:
            self._reports.finish()
        return results

    def withdraw(self) -> bool:
        if not self.claim():
            return False
        self.outcome.cancel()
        return True


def _look_at(outcome: asyncio.Future[list[RowResult]]) -> None:
    """Keep asyncio from reporting an error that nobody waits for: the step before told it."""
    if not outcome.cancelled():
        outcome.exception()


def engine_failed(error: Exception) -> EngineFailed:
    """Return what whoever waits for a step is told."""
    return EngineFailed(f"the engine failed: {type(error).__name__}: {error}")


class _LayerReports:
    """Carries layer events from the compute thread to the loop: one wake-up for all layers since
    the last.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, num_layers: int, on_layers_done: OnLayersDone
    ) -> None:
        self._loop = loop
        self._num_layers = num_layers
        self._on_layers_done = on_layers_done
        self.layers_at: list[float] = []
        self._num_written = 0
        self._num_delivered = 0
        self._is_scheduled = False

    def written(self, layer: int) -> None:
        """Runs on the compute thread."""
        self.layers_at.append(time.monotonic())
        # Order matters, and replaces a lock: publish the count first, look for a scheduled delivery
        # second. A delivery clears the flag first and reads the count second, so no layer is left
        # behind.
        self._num_written = layer + 1
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        self._report(self._num_written)

    def finish(self) -> None:
        """Deliver all layers that are not delivered yet; runs on the loop."""
        self._report(self._num_layers)

    def _report(self, num_layers: int) -> None:
        if num_layers > self._num_delivered:
            self._num_delivered = num_layers
            self._on_layers_done(num_layers)
