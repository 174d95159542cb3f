"""A compute runner for virtual time: the engine runs inline and takes ``engine.step_seconds`` of
loop time, spread over its layers, so that what a layer-wise push hides under compute can be seen
and asserted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from shared.engine.base import Engine
from shared.engine.worker import BegunStep, OnLayersDone, StepDone, engine_failed, fill_in
from shared.errors import MeshError
from shared.step import RowResult, StepRow, ToCome

T = TypeVar("T")


class ModelledEngine(Engine, Protocol):
    """An engine that knows what its steps take, for it makes that up."""

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        """Return the duration of a step."""
        ...


class VirtualCompute:
    """Runs the engine inline and lets the loop's clock move by the modelled step time.

    The engine writes the whole step's KV at the start of the step; the layer events, the results
    and the end of the step come at their modelled times."""

    def __init__(self, engine: ModelledEngine, *, copy_s: float = 0.0) -> None:
        """copy_s: loop time that every copy takes."""
        self._engine = engine
        self._num_layers = engine.layout.num_layers
        self._copy_s = copy_s
        self._rows: Sequence[StepRow] = ()
        self._last: Sequence[RowResult] = ()

    def begin(
        self,
        rows: Sequence[StepRow],
        to_come: ToCome = (),
        on_layers_done: OnLayersDone | None = None,
    ) -> BegunStep:
        """See ComputeRunner."""
        return _VirtualStep(lambda: self._run(rows, to_come, on_layers_done))

    async def _run(
        self, rows: Sequence[StepRow], to_come: ToCome, on_layers_done: OnLayersDone | None
    ) -> tuple[list[RowResult], StepDone]:
        fill_in(to_come, self._last)
        began_at = asyncio.get_running_loop().time()
        step_s = self._engine.step_seconds(rows)
        if rows is not self._rows:  # who measures a step takes it again and again
            self._last = self._compute(rows)
            self._rows = rows
        results = self._last
        layers_at = [
            began_at + step_s * num_done / self._num_layers
            for num_done in range(1, self._num_layers + 1)
        ]
        for num_done, layer_at in enumerate(layers_at, 1):
            await _sleep_until(layer_at)
            if on_layers_done is not None:
                on_layers_done(num_done)
        return list(results), StepDone(layers_at, layers_at[-1])

    def _compute(self, rows: Sequence[StepRow]) -> Sequence[RowResult]:
        try:
            return self._engine.step(rows)
        except MeshError:
            raise
        except Exception as error:
            raise engine_failed(error) from error

    async def copy(self, work: Callable[[], T]) -> T:
        """See ComputeRunner."""
        await asyncio.sleep(self._copy_s)
        return work()

    async def close(self) -> None:
        """See ComputeRunner."""


async def _sleep_until(when: float) -> None:
    # Absolute times, so that rounding errors of the layers do not add up.
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))


class _VirtualStep:
    """See BegunStep. It begins when its results are waited for: whoever takes steps waits for one
    after the other, and between them no virtual time passes."""

    def __init__(
        self, run: Callable[[], Coroutine[Any, Any, tuple[list[RowResult], StepDone]]]
    ) -> None:
        self.seconds = 0.0
        self.done = StepDone()
        self._run = run
        self._has_begun = False

    async def results(self) -> list[RowResult]:
        self._has_begun = True
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        results, self.done = await self._run()
        self.seconds = loop.time() - began_at
        return results

    def withdraw(self) -> bool:
        return not self._has_begun


class VirtualThread:
    """See OrderedWork: work is done at once, after ``delay_s`` of loop time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.delay_s = 0.0
        self._free_at = 0.0

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """See OrderedWork."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def do() -> None:
            try:
                result = work()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._free_at = max(self._free_at, loop.time()) + self.delay_s
        loop.call_at(self._free_at, do)
        return future

    def end(self) -> None:
        """See OrderedWork."""
