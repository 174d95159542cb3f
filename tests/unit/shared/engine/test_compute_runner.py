"""The compute runners: what they promise to a step loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest

from shared.engine.base import Launch, OnLayer, QueuedStep
from shared.engine.fake import FakeEngine
from shared.engine.work_thread import WorkThread, run_and_end
from shared.engine.worker import ThreadCompute
from shared.errors import EngineFailed, NoCapacity
from shared.step import RowResult, StepRow, ToCome


class _Gate(FakeEngine):
    """A fake engine whose step waits, after each layer, until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)
        self.go_on = threading.Semaphore(0)
        self.thread_names: list[str] = []

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        self.thread_names.append(threading.current_thread().name)

        def gated(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)
            self.go_on.acquire()

        return super().step(rows, gated)


ROW = StepRow(token_ids=[1, 2, 3], start=0, block_table=[0])


class _Queue(FakeEngine):
    """A fake engine that takes steps of one row into a queue, and notes what happens to them.

    ending: what is told, by first token, to be nearly done. ended: whose results may be read.
    """

    def __init__(self) -> None:
        super().__init__(num_blocks=8)
        self.notes: list[str] = []
        self.ending = threading.Event()
        self.ended = threading.Semaphore(0)
        self.error: Exception | None = None

    def prepare(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> Launch | None:
        if len(rows) > 1:
            return None
        engine, name = self, f"{rows[0].start}"
        self.notes.append(f"prepare {name}")

        class Step(QueuedStep):
            def __init__(self) -> None:
                engine.notes.append(f"launch {name}")

            def is_ending(self) -> bool:
                return engine.ending.is_set()

            def wait_until_ending(self) -> None:
                engine.ending.wait()

            def results(self) -> list[RowResult]:
                engine.ended.acquire()
                engine.notes.append(f"read {name}")
                if engine.error is not None:
                    raise engine.error
                return [RowResult(10 + int(name))]

        return Step

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        self.notes.append(f"step {rows[0].start} of {[row.token_ids[0] for row in rows]}")
        return [RowResult(0)] * len(rows)


def _row(start: int) -> tuple[list[StepRow], ToCome]:
    """A row whose token is still to come, and where it comes from."""
    lacking = [-1]
    return [StepRow(lacking, start, [0])], [(lacking, 0)]


async def _noted(engine: _Queue, *notes: str) -> None:
    async with asyncio.timeout(30):
        while engine.notes != list(notes):
            await asyncio.sleep(0.001)


async def test_a_step_is_queued_behind_the_one_that_is_ending() -> None:
    """Before that one's results were read, and no earlier."""
    engine = _Queue()
    compute = ThreadCompute(engine)
    first = compute.begin([StepRow([5], 1, [0])])
    rows, to_come = _row(2)
    second = compute.begin(rows, to_come)
    await _noted(engine, "prepare 1", "launch 1", "prepare 2")
    engine.ending.set()
    await _noted(engine, "prepare 1", "launch 1", "prepare 2", "launch 2")
    assert not second.withdraw()
    engine.ended.release(2)
    assert [one.token_id for one in await first.results()] == [11]
    assert [one.token_id for one in await second.results()] == [12]
    assert rows[0].token_ids == [11]
    assert engine.notes[4:] == ["read 1", "read 2"]
    assert second.seconds > 0
    await compute.close()


async def test_a_prepared_step_may_be_withdrawn_for_another() -> None:
    """Until the one before it is ending; the other is queued in its stead."""
    engine = _Queue()
    compute = ThreadCompute(engine)
    first = compute.begin([StepRow([5], 1, [0])])
    withdrawn = compute.begin(*_row(2))
    await _noted(engine, "prepare 1", "launch 1", "prepare 2")
    assert withdrawn.withdraw()
    second = compute.begin(*_row(3))
    engine.ending.set()
    engine.ended.release(2)
    await first.results()
    assert [one.token_id for one in await second.results()] == [13]
    assert "launch 2" not in engine.notes
    assert "launch 3" in engine.notes
    await compute.close()


async def test_a_step_that_cannot_be_queued_waits_for_the_tokens_that_it_lacks() -> None:
    """It runs on the host's numbers."""
    engine = _Queue()
    compute = ThreadCompute(engine)
    first = compute.begin([StepRow([5], 1, [0])])
    rows, to_come = _row(2)
    second = compute.begin([*rows, StepRow([7], 2, [1])], to_come)
    engine.ending.set()
    engine.ended.release()
    await first.results()
    await second.results()
    assert engine.notes == ["prepare 1", "launch 1", "read 1", "step 2 of [11, 7]"]
    await compute.close()


async def test_what_was_queued_behind_a_step_that_failed_fails_too() -> None:
    """Its results are read by nobody."""
    engine = _Queue()
    compute = ThreadCompute(engine)
    first, second = compute.begin([StepRow([5], 1, [0])]), compute.begin(*_row(2))
    engine.ending.set()
    await _noted(engine, "prepare 1", "launch 1", "prepare 2", "launch 2")
    engine.error = EngineFailed("the device is gone")
    engine.ended.release(2)
    for step in (first, second):
        with pytest.raises(EngineFailed):
            await step.results()
    assert engine.notes[4:] == ["read 1"]
    await compute.close()


async def test_layer_events_come_on_the_loop_in_order_and_all_before_the_step_returns() -> None:
    """Every layer is reported once, on the loop's thread, before the results are there."""
    engine = _Gate()
    compute = ThreadCompute(engine, name="t")
    seen: list[int] = []
    threads: list[int] = []

    def on_layers_done(num_layers: int) -> None:
        seen.append(num_layers)
        threads.append(threading.get_ident())
        engine.go_on.release()

    await compute.begin([ROW], (), on_layers_done).results()
    await compute.close()
    assert seen == list(range(1, engine.layout.num_layers + 1))
    assert set(threads) == {threading.get_ident()}
    assert engine.thread_names[0].startswith("t-compute")


async def test_layers_that_the_loop_was_too_busy_for_come_in_one_call() -> None:
    """A loop that wakes late hears of all finished layers at once."""
    engine = _Gate()
    compute = ThreadCompute(engine)
    seen: list[int] = []
    engine.go_on.release(engine.layout.num_layers)
    async with asyncio.TaskGroup() as tasks:
        step = tasks.create_task(compute.begin([ROW], (), seen.append).results())
        await asyncio.sleep(0)  # the step is on its thread now
        barrier = threading.Event()
        compute._steps.run(barrier.set)  # runs after the step
        assert barrier.wait(30)  # holds the loop as a slow callback would
        await step
    await compute.close()
    assert seen == [engine.layout.num_layers]


async def test_layers_are_done_when_they_were_called_out_if_the_device_says_nothing() -> None:
    """In order, by the loop's clock, and before the step was over."""
    compute = ThreadCompute(FakeEngine(num_blocks=8))
    now = asyncio.get_running_loop().time
    began_at = now()
    step = compute.begin([ROW], (), lambda _: None)
    await step.results()
    await compute.close()
    times = [began_at, *step.done.layers_at, step.done.step_at, now()]
    assert times == sorted(times)
    assert len(step.done.layers_at) == FakeEngine(num_blocks=1).layout.num_layers


async def test_layers_are_done_when_the_device_says() -> None:
    """Not when they were queued."""

    class Device(FakeEngine):
        def layer_times(self) -> Sequence[float]:
            return (1.0, 2.0, 3.0, 4.0)

    compute = ThreadCompute(Device(num_blocks=8))
    step = compute.begin([ROW], (), lambda _: None)
    await step.results()
    await compute.close()
    assert step.done.layers_at == (1.0, 2.0, 3.0, 4.0)


async def test_copies_run_beside_a_step() -> None:
    """A gather never waits for the step that runs."""
    engine = _Gate()
    compute = ThreadCompute(engine)
    async with asyncio.TaskGroup() as tasks:
        step = tasks.create_task(compute.begin([ROW]).results())
        name = await compute.copy(lambda: threading.current_thread().name)
        assert not step.done()
        engine.go_on.release(engine.layout.num_layers)
    await compute.close()
    assert "copy" in name


@pytest.mark.parametrize(
    ("error", "seen"),
    [(ValueError("bad kernel"), EngineFailed), (NoCapacity("typed"), NoCapacity)],
)
async def test_an_engine_that_raises_fails_the_step_with_a_typed_error(
    error: Exception, seen: type[Exception]
) -> None:
    """What is not a MeshError becomes EngineFailed."""

    class Broken(FakeEngine):
        def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
            raise error

    compute = ThreadCompute(Broken(num_blocks=8))
    with pytest.raises(seen):
        await compute.begin([ROW]).results()
    await compute.close()


async def test_close_waits_for_a_step_whose_waiter_was_cancelled() -> None:
    """A cancelled wait ends no step: ``close`` returns after it."""
    engine = _Gate()
    compute = ThreadCompute(engine)
    results: list[str] = []
    finish: Callable[[int], None] = lambda _: results.append("layer")  # noqa: E731
    async with asyncio.TaskGroup() as tasks:
        step = tasks.create_task(compute.begin([ROW], (), finish).results())
        await asyncio.sleep(0)
        step.cancel()
        closing = tasks.create_task(compute.close())
        await asyncio.sleep(0)
        assert not closing.done()
        engine.go_on.release(engine.layout.num_layers)


async def test_work_runs_in_order_and_although_its_wait_was_cancelled() -> None:
    """Who owns its buffers counts on that; an error is its own waiter's, and the thread goes on."""
    thread = WorkThread("t")
    done: list[int] = []
    gate = threading.Event()
    first = thread.run(gate.wait)
    cancelled = thread.run(lambda: done.append(1))
    failing = thread.run(lambda: next(iter(())))
    last = thread.run(lambda: done.append(2))
    cancelled.cancel()
    gate.set()
    assert await first
    with pytest.raises(RuntimeError, match="StopIteration"):
        await failing
    await last
    assert done == [1, 2]
    await asyncio.to_thread(thread.close)
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(gate.wait)


async def test_finished_work_holds_nothing() -> None:
    """Memory that a gather wrote is given back when its owner lets go, not with the next gather."""

    class Memory:
        pass

    thread = WorkThread("t")
    memory = Memory()
    gone = threading.Event()
    weakref.finalize(memory, gone.set)
    await thread.run(lambda held=memory: held is not None)
    del memory
    assert await asyncio.to_thread(gone.wait, 30)
    await asyncio.to_thread(thread.close)


async def test_who_loads_leaves_no_thread_behind() -> None:
    """A thread that has computed keeps its team for as long as it lives."""
    seen: list[threading.Thread] = []

    def load() -> int:
        seen.append(threading.current_thread())
        return 7

    assert await run_and_end("load", load) == 7
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()

    def fail() -> None:
        seen.append(threading.current_thread())
        raise KeyError("no model")

    with pytest.raises(KeyError, match="no model"):
        await run_and_end("load", fail)
    await asyncio.to_thread(seen[1].join, 30)
    assert not seen[1].is_alive()


async def test_who_waits_hears_that_a_thread_could_not_be_prepared() -> None:
    """Every one, with the reason: a thread that died of it would leave them waiting for ever."""

    def refuse() -> None:
        raise PermissionError("no priority")

    thread = WorkThread("t", refuse)
    async with asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(PermissionError, match="no priority"):
                await thread.run(list)
    await asyncio.to_thread(thread.close)
