"""The loop that services run on."""

from __future__ import annotations

import gc
import time

import pytest

from shared.runtime.service import EXIT_OK, Process, run_service


def test_the_loops_clock_measures_within_one_iteration() -> None:
    """Durations finer than a millisecond are seen; uvloop's own clock stands still meanwhile."""
    pytest.importorskip("uvloop")
    elapsed: list[float] = []

    async def main(process: Process) -> bool:
        import asyncio

        loop = asyncio.get_running_loop()
        began_at, real_began_at = loop.time(), time.monotonic()
        while time.monotonic() - real_began_at < 0.0003:
            pass
        elapsed.append(loop.time() - began_at)
        process.stop.set()
        return True

    assert run_service("test", main) == EXIT_OK
    assert elapsed[0] >= 0.0003


def test_what_is_loaded_when_a_service_is_ready_is_not_collected_again() -> None:
    """A full collection over all modules would hold the loop up."""
    loaded = ["stays"]
    seen: list[bool] = []

    async def main(process: Process) -> bool:
        seen.append(any(one is loaded for one in gc.get_objects()))
        process.ready()
        seen.append(any(one is loaded for one in gc.get_objects()))
        process.stop.set()
        return True

    try:
        assert run_service("test", main) == EXIT_OK
    finally:
        gc.unfreeze()
    assert seen == [True, False]
