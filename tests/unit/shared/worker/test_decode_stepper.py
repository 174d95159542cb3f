"""The decode loop on real threads: which step runs when, and who is in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from shared.engine.base import OnLayer
from shared.engine.fake import FakeEngine
from shared.engine.worker import ThreadCompute
from shared.errors import EngineFailed, MeshError
from shared.schedule.plan import Failure, NewToken
from shared.schedule.sequence import Sequence as TokenSequence
from shared.step import RowResult, StepRow
from shared.telemetry.worker import DecodeMetrics
from shared.worker.stepper import Stepper
from tests.support.cores import MODEL, Worker, a_sequence, answer_of
from tests.support.fake_reference import fake_answer


class _Gate(FakeEngine):
    """Each step waits until the test lets it end; a step may be made to fail."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, num_blocks=64, block_size=4)
        self.may_end = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.fails_at = 1 << 30

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        self.sizes.append(len(rows))
        if len(self.sizes) > self.fails_at:
            raise ValueError("a device is gone")
        results = super().step(rows, on_layer)
        self.may_end.acquire()
        return results


class _Sink:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.tokens: list[NewToken] = []
        self.on_tokens: Callable[[], None] = lambda: None
        self.error: MeshError | None = None

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        """Nothing to do."""

    def announce(self, plan: object) -> tuple[()]:
        """Nobody pushes."""
        return ()

    def step_done(self, tokens: Sequence[NewToken], pushes: object, done: object) -> None:
        """Tokens came."""
        self.tokens += tokens
        self.on_tokens()

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        """Never here."""
        raise AssertionError(failures)

    def rests(self) -> None:
        """Nobody waits for room."""

    def fail_all(self, error: MeshError) -> None:
        """The last word."""
        self.error = error


class Loop:
    """A stepper at work, and what stands around it."""

    def __init__(self, *, look_ahead: bool = True) -> None:
        self.engine = _Gate()
        self.worker = Worker(num_blocks=64, block_size=4)
        self.scheduler, self.sink = self.worker.scheduler, _Sink()
        self.compute = ThreadCompute(self.engine)
        self.told: list[float] = []
        self.stepper = Stepper(
            compute=self.compute,
            scheduler=self.scheduler,
            metrics=DecodeMetrics(),
            sink=self.sink,
            on_step=lambda plan, seconds: self.told.append(seconds),
            look_ahead=look_ahead,
        )

    @staticmethod
    def _four_tokens(first: int, max_tokens: int) -> TokenSequence:
        return a_sequence(tuple(range(first, first + 4)), max_tokens=max_tokens, ignore_eos=True)

    def add(self, first: int, max_tokens: int = 20) -> TokenSequence:
        """Add a prompt of four tokens."""
        sequence = self._four_tokens(first, max_tokens)
        self.scheduler.add(sequence)
        self.stepper.changed()
        return sequence

    def ready(self, first: int, max_tokens: int = 20) -> TokenSequence:
        """Add one whose KV came from elsewhere."""
        sequence = self._four_tokens(first, max_tokens)
        prompt = sequence.item.token_ids
        expected, _ = fake_answer(prompt, sequence.sampling, model=MODEL)
        chain = self.worker.pool.new_chain()
        table = self.worker.pool.acquire(chain, prompt, 4, max_hit_tokens=0)
        assert table is not None
        donor = Worker(num_blocks=8, block_size=4)
        copy = a_sequence(prompt)
        donor.scheduler.add_prefill(copy)
        donor.step()
        frame = donor.engine.new_buffer(4 * MODEL.layout.token_bytes)
        donor.engine.gather(copy.block_table, 0, 4, 0, MODEL.num_layers, frame)
        self.engine.scatter(table.blocks, 0, 4, 0, MODEL.num_layers, frame)
        sequence.table, sequence.chain, sequence.num_computed_tokens = table, chain, 4
        sequence.tokens.append(expected[0])
        self.scheduler.add_ready(sequence)
        self.stepper.changed()
        return sequence

    def abort(self, sequence: TokenSequence) -> None:
        """Take it out."""
        self.scheduler.abort(sequence)
        self.stepper.changed()

    async def begun(self, num_steps: int) -> None:
        """Wait until so many steps have begun."""
        while len(self.engine.sizes) < num_steps:
            await asyncio.sleep(0.001)

    def held_until(self, num_steps: int) -> None:
        """The same, and the loop has no turn meanwhile."""
        deadline = time.monotonic() + 30
        while len(self.engine.sizes) < num_steps:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    async def got(self, num_tokens: int) -> None:
        """Wait for so many tokens."""
        while len(self.sink.tokens) < num_tokens:
            await asyncio.sleep(0.001)


def assert_exact(*sequences: TokenSequence) -> None:
    """Each has the answer that the reference gives."""
    for sequence in sequences:
        expected, _ = fake_answer(sequence.item.token_ids, sequence.sampling, model=MODEL)
        assert answer_of(sequence) == expected


@contextlib.asynccontextmanager
async def a_loop(*, look_ahead: bool = True) -> AsyncGenerator[Loop]:
    """Run one; cancelled at the end, and nothing is left on its thread."""
    loop = Loop(look_ahead=look_ahead)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(loop.stepper.run())
        try:
            yield loop
        finally:
            task.cancel()
            await asyncio.wait([task])
            loop.engine.may_end.release(1000)
            await loop.compute.close()


async def test_the_thread_goes_from_one_step_to_the_next_without_the_loop() -> None:
    """A loop that is held up holds up one step and not two: the next one has begun."""
    async with a_loop() as loop:
        loop.ready(1)
        await loop.begun(1)
        loop.engine.may_end.release(1)
        loop.held_until(2)
        assert not loop.sink.tokens
        await loop.got(1)


async def test_without_look_ahead_a_step_waits_for_the_tokens_of_the_one_before() -> None:
    """``look_ahead=False``: nothing is given to the thread before its time."""
    async with a_loop(look_ahead=False) as loop:
        loop.ready(1)
        await loop.begun(1)
        loop.engine.may_end.release(1)
        assert not threading.Event().wait(0.05)
        assert loop.engine.sizes == [1]
        await loop.begun(2)
        assert len(loop.sink.tokens) == 1


async def test_who_joins_while_a_step_runs_is_in_the_next() -> None:
    """Planned before or not: a hand-over waits for no second step."""
    async with a_loop() as loop:
        first = loop.ready(1)
        await loop.begun(1)
        await asyncio.sleep(0)
        second, third = loop.ready(11), loop.ready(21)
        await asyncio.sleep(0)  # one turn: planned again, for both
        loop.engine.may_end.release(1)
        await loop.begun(2)
        assert loop.engine.sizes == [1, 3]
        loop.engine.may_end.release(1000)
        await loop.got(3 * 19)
        assert_exact(first, second, third)
        assert loop.worker.pool.num_held == 0


async def test_who_is_aborted_while_a_step_runs_is_not_in_the_next() -> None:
    """And the others are; its blocks go with the step that had it."""
    async with a_loop() as loop:
        first, second = loop.ready(1), loop.ready(11)
        await loop.begun(1)
        loop.abort(second)
        await asyncio.sleep(0)
        loop.engine.may_end.release(1)
        await loop.begun(2)
        await loop.got(1)
        assert loop.engine.sizes == [2, 1]
        assert {token.sequence for token in loop.sink.tokens} == {first}
        loop.worker.check()
        assert second.is_over or second.table is None


async def test_after_somebody_joined_the_thread_still_needs_no_loop() -> None:
    """The next step was planned again, and waits on the thread."""
    async with a_loop() as loop:
        loop.ready(1, max_tokens=2)  # sure to end with the first step: nothing is planned ahead
        await loop.begun(1)
        await asyncio.sleep(0)
        loop.ready(11)
        await asyncio.sleep(0)
        loop.engine.may_end.release(1)
        loop.held_until(2)


async def test_what_the_thread_has_begun_is_not_taken_back() -> None:
    """Somebody leaves and somebody comes in the moment between a step's end and the loop's hearing
    of it: blocks wait for the step that runs, and every answer is exact."""
    async with a_loop() as loop:
        first, second = loop.ready(1), loop.ready(11)
        await loop.begun(1)
        await asyncio.sleep(0)
        loop.engine.may_end.release(1)
        loop.held_until(2)
        loop.abort(second)
        third = loop.ready(21)
        await loop.got(1)
        assert second.table is not None
        loop.engine.may_end.release(1)
        await loop.begun(3)
        assert second.table is None
        assert loop.engine.sizes == [2, 2, 2]
        loop.engine.may_end.release(1000)
        await loop.got(2 * 19)
        assert_exact(first, third)
        loop.worker.check()
        assert loop.worker.pool.num_held == 0


async def test_it_is_quiet_when_the_row_too_far_is_done_as_well() -> None:
    """A worker that drains waits for that: it gives every block back before it ends."""
    async with a_loop() as loop:
        await loop.stepper.quiet()
        sequence = loop.ready(1)
        await loop.begun(1)
        await asyncio.sleep(0)
        stop = dataclasses.replace(sequence.sampling, stop_token_ids=frozenset(range(64)))
        sequence.item = dataclasses.replace(sequence.item, sampling=stop)
        loop.engine.may_end.release(1)
        await loop.got(1)
        assert sequence.is_over
        async with asyncio.TaskGroup() as tasks:
            quiet = tasks.create_task(loop.stepper.quiet())
            await loop.begun(2)
            assert not quiet.done()
            assert loop.worker.pool.num_held > 0
            loop.engine.may_end.release(1)
        assert loop.worker.pool.num_held == 0


async def test_a_prompt_comes_between_steps_that_were_planned_ahead() -> None:
    """On a colocated worker the next step is taken back for it, and planning ahead goes on after
    it."""
    async with a_loop() as loop:
        first = loop.ready(1)
        await loop.begun(1)
        second = loop.add(11)
        loop.engine.may_end.release(1000)
        await loop.got(19 + 20)
        assert_exact(first, second)
        assert loop.engine.sizes[:2] == [1, 2]


async def test_a_device_that_fails_is_told_once_and_the_next_step_never_runs() -> None:
    """The step that was to go on from it has no tokens to go on from."""
    loop = Loop()
    loop.engine.fails_at = 2
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    loop.ready(1)
    loop.engine.may_end.release(1000)
    async with asyncio.timeout(60):
        with pytest.raises(EngineFailed, match="a device is gone"):
            await loop.stepper.run()
    await loop.compute.close()
    await asyncio.sleep(0)
    assert loop.sink.error is not None
    assert len(loop.engine.sizes) == 3
    del loop.stepper
    gc.collect()
    assert not problems


async def test_after_a_failure_a_step_of_newcomers_alone_does_not_run_either() -> None:
    """It needs no token of the step before, but the device is as broken."""
    engine = _Gate()
    engine.fails_at, compute = 0, ThreadCompute(engine)
    row = StepRow(token_ids=[1], start=0, block_table=[0])
    first, second = compute.begin([row]), compute.begin([row])
    with pytest.raises(EngineFailed, match="a device is gone"):
        await first.results()
    with pytest.raises(EngineFailed, match="before"):
        await second.results()
    await compute.close()
    assert len(engine.sizes) == 1


async def test_a_step_tells_how_long_the_engine_took() -> None:
    """Its own time, not the loop's."""
    engine = _Gate()
    compute = ThreadCompute(engine)
    step = compute.begin([StepRow(token_ids=[1], start=0, block_table=[0])])
    assert step.seconds == 0
    assert not threading.Event().wait(0.03)
    engine.may_end.release(1)
    await step.results()
    assert 0.02 < step.seconds < 30
    await compute.close()


@pytest.mark.parametrize("look_ahead", [False, True])
async def test_what_stands_around_a_step_counts_and_a_rest_does_not(
    look_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is busy for a second while tokens are handed on has steps of a second."""
    clock = asyncio.get_running_loop()
    time_now, passed_s = clock.time, 0.0
    monkeypatch.setattr(clock, "time", lambda: time_now() + passed_s)

    def let_pass(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    async with a_loop(look_ahead=look_ahead) as loop:
        loop.sink.on_tokens = lambda: let_pass(1.0)
        loop.engine.may_end.release(1000)
        loop.ready(1, max_tokens=4)
        await loop.got(3)
        await loop.stepper.quiet()
        num_steps = len(loop.told)
        assert min(loop.told[1:num_steps]) >= 1.0
        let_pass(10.0)
        loop.ready(5, max_tokens=2)
        await loop.got(4)
        assert loop.told[num_steps] < 10.0


async def test_a_loop_that_is_cancelled_takes_the_next_step_back() -> None:
    """Closing waits for the running step alone."""
    async with a_loop() as loop:
        loop.ready(1)
        await loop.begun(1)
        await asyncio.sleep(0)
    assert loop.engine.sizes == [1]
