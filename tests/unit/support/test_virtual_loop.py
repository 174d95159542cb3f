"""Virtual time itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.virtual_loop import Deadlock, run_virtual


def test_years_pass_in_no_time() -> None:
    """Sleeping jumps the clock, exactly, and costs nothing."""

    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            for days in range(1, 366):
                tasks.create_task(asyncio.sleep(86400 * days))
        return asyncio.get_running_loop().time()

    started_at = time.perf_counter()
    assert run_virtual(main()) == 86400 * 365
    assert time.perf_counter() - started_at < 30


def test_order_is_the_order_of_time() -> None:
    """Timers fire in order of their time, whatever the order of their making."""
    seen: list[float] = []

    async def at(when: float) -> None:
        await asyncio.sleep(when)
        seen.append(asyncio.get_running_loop().time())

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for when in (0.3, 0.1, 2.0, 0.2, 1e-6):
                tasks.create_task(at(when))

    run_virtual(main())
    assert seen == sorted(seen)
    assert len(seen) == 5


def test_timeouts_are_exact() -> None:
    """``asyncio.timeout`` ends at its instant."""

    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(12.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 12.5


def test_waiting_for_nothing_is_a_deadlock() -> None:
    """Nothing ready and no timer: the loop raises and names the place."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="test_virtual_loop"):
        run_virtual(main())


def test_exceptions_come_out() -> None:
    """What the program raises is what ``run_virtual`` raises."""

    async def main() -> None:
        await asyncio.sleep(3)
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_virtual(main())


def test_a_seed_makes_random_repeat() -> None:
    """The global random source is seeded."""
    import random

    async def main() -> float:
        return random.random()

    assert run_virtual(main(), seed=5) == run_virtual(main(), seed=5)
    assert run_virtual(main(), seed=5) != run_virtual(main(), seed=6)
