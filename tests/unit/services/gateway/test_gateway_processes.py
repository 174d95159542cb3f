"""The parent of several gateway processes, where the machine is at its end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway import processes
from services.gateway.processes import ProcessFailed
from shared.config import GatewayConfig
from tests.support.virtual_loop import virtual_time

FACTS = {"http_port": 8000, "grpc_port": 8100, "mesh_port": 8200}


class FakeProcess:
    """One that lives until it is told to end."""

    returncode: int | None = None

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        self.returncode = self.code
        return self.code

    def send_signal(self, number: int) -> None:
        self.ended.set()


@virtual_time
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_process_that_cannot_be_started_is_tried_again_once_one_was(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a parent that is out of memory for a moment would end the gateways that serve."""
    starts: list[FakeProcess | None] = []

    @asynccontextmanager
    async def child(module: str, env: dict[str, str]) -> AsyncGenerator[Any]:
        starts.append(None)
        if len(starts) == (1 if is_first else 2):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = starts[-1] = FakeProcess()

        async def words() -> AsyncIterator[dict[str, Any]]:
            yield FACTS
            await process.ended.wait()

        yield process, words()

    monkeypatch.setattr(processes, "child_process", child)
    one = processes._Child(0, GatewayConfig(), lambda **_: None)  # pyright: ignore[reportPrivateUsage]
    if is_first:
        with pytest.raises(ProcessFailed, match="it cannot be started: Resource temporarily"):
            await one.keep_running()
        return
    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(one.keep_running())
        await one.ready.wait()
        assert starts[0] is not None
        starts[0].ended.set()
        while len(starts) < 3:
            await asyncio.sleep(0.1)
        one.stop()


@pytest.mark.parametrize(("codes", "whole"), [((0, 0), 0), ((3, 0), 3), ((0, -9), 137)])
def test_the_parent_ends_as_the_worst_of_its_processes(
    codes: tuple[int, int], whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed amid its drain is no good end, either."""
    left = list(codes)

    @asynccontextmanager
    async def child(module: str, env: dict[str, str]) -> AsyncGenerator[Any]:
        process = FakeProcess(left.pop(0))

        async def words() -> AsyncIterator[dict[str, Any]]:
            yield FACTS
            await process.ended.wait()

        yield process, words()

    def run_service(name: str, main: Any, *, drain_s: float) -> int:
        stop = asyncio.Event()

        def ready(**facts: Any) -> None:
            stop.set()

        asyncio.run(main(SimpleNamespace(tell=None, ready=ready, stop=stop)))
        return 0

    monkeypatch.setattr(processes, "child_process", child)
    monkeypatch.setattr(processes, "run_service", run_service)
    assert processes.run_gateways(GatewayConfig(gateway_processes=2)) == whole
