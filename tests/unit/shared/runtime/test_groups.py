"""One error out of a group, and cancellations that come from outside alone."""

from __future__ import annotations

import asyncio

import pytest

from shared.runtime.groups import TaskGroup, plain_errors


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("a child")


async def grouped(*, waits: bool) -> None:
    with plain_errors():
        async with TaskGroup() as tasks:
            tasks.create_task(fails())
            if waits:
                await asyncio.sleep(60)


@pytest.mark.parametrize("waits", [True, False], ids=["within the body", "after it"])
async def test_an_error_of_a_child_is_no_cancellation(waits: bool) -> None:
    """Whoever retries after errors goes on."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ValueError, match="a child"):
        await grouped(waits=waits)
    assert not task.cancelling()
    async with asyncio.timeout(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("waits", [True, False], ids=["within the body", "after it"])
async def test_a_cancellation_that_meets_an_error_wins(waits: bool) -> None:
    """It was asked for, and nobody asks again."""
    async with asyncio.TaskGroup() as tasks:
        grouping = tasks.create_task(grouped(waits=waits))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        grouping.cancel()
    assert grouping.cancelled()
