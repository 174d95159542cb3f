"""The compute runner for virtual time: what it adds to the loop's clock, and when it reports."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.fake import FakeEngine, FakeTiming
from shared.errors import EngineFailed
from shared.step import StepRow
from tests.support.virtual_compute import VirtualCompute
from tests.support.virtual_loop import virtual_time

ROW = StepRow(token_ids=[1, 2, 3], start=0, block_table=[0])


@virtual_time
async def test_a_step_takes_its_modelled_time_spread_over_its_layers() -> None:
    """Four layers of one second: one report a quarter, the last one at the end."""
    loop = asyncio.get_running_loop()
    engine = FakeEngine(num_blocks=4, timing=FakeTiming(base_s=1.0, prefill_token_s=0.0))
    seen: list[tuple[int, float]] = []
    step = VirtualCompute(engine).begin([ROW], (), lambda n: seen.append((n, loop.time())))
    await step.results()
    assert [n for n, _ in seen] == [1, 2, 3, 4]
    assert [at for _, at in seen] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert loop.time() == pytest.approx(1.0)


@virtual_time
async def test_copies_take_their_time_beside_a_step() -> None:
    """A gather does not wait for the step, and does not lengthen it."""
    loop = asyncio.get_running_loop()
    engine = FakeEngine(num_blocks=4, timing=FakeTiming(base_s=1.0, prefill_token_s=0.0))
    compute = VirtualCompute(engine, copy_s=0.3)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(compute.begin([ROW]).results())
        assert await compute.copy(lambda: 7) == 7
        assert loop.time() == pytest.approx(0.3)
    assert loop.time() == pytest.approx(1.0)


@virtual_time
async def test_an_engine_that_raises_is_a_failed_engine() -> None:
    """The same typed error as from the threads."""
    engine = FakeEngine(num_blocks=4)

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    engine.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineFailed, match="device lost"):
        await VirtualCompute(engine).begin([ROW]).results()
