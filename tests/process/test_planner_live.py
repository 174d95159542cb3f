"""``pdmesh up --planner act`` with real processes: the load grows and a worker is started, it falls
and one ends; nobody loses an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from bench.autoscaler.live import RATES, SECONDS, asks, compare, run_live, run_simulated
from bench.autoscaler.scaled import LOOK_S
from tests.support.command import pdmesh

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.nightly, pytest.mark.timeout(400)]

MESH = (
    *("--engine", "fake", "--device", "cpu", "--port", "0", "--prefill", "1", "--decode", "1"),
    *("--num-blocks", "1024", "--planner-ttft-s", "2", "--planner-tpot-s", "0.5"),
)
SLOW = {
    "PDMESH_FAKE_STEP_S": "0.2",
    "PDMESH_BATCH_TOKENS": "1",
    "PDMESH_PLANNER_DWELL_S": "30",
}
"""A prompt takes 0.2 s, alone: a worker computes five a second."""

LIMIT_S = 280.0


class Load:
    """Requests at an even rate until it is left, and what became of them."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.rate = 1.0
        self.failed: list[Any] = []
        self.num_done = 0

    async def run(self) -> None:
        """Ask until cancelled; answers that are under way then are dropped."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                number += 1
                tasks.create_task(self._ask(number))
                await asyncio.sleep(1 / self.rate)

    async def _ask(self, number: int) -> None:
        body = {"prompt": [number % 60 + 3] * 40, "max_tokens": 3, "ignore_eos": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200 or answer["usage"]["completion_tokens"] != 3:
            self.failed.append(answer)
        self.num_done += 1

    async def planner(self) -> dict[str, Any]:
        """What /cluster tells of it."""
        async with self._session.get(f"{self._url}/cluster") as response:
            return (await response.json())["planner"]

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Look until this holds."""
        async with asyncio.timeout(LIMIT_S):
            while not holds(planner := await self.planner()):
                await asyncio.sleep(0.5)
            return planner


async def test_a_worker_comes_with_the_load_and_goes_with_it() -> None:
    """One prefill worker at one request/s, more at eight, one again half a minute after."""
    up = pdmesh("up", *MESH, "--planner", "act", "--max-workers", "4", limit_s=LIMIT_S, **SLOW)
    async with (
        up as mesh,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        load = Load(session, await mesh.url())
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(load.run())
            rested = await load.until(lambda it: bool(it["busy"]) and not it["hold"])
            assert rested["wanted"] == {"prefill": 1, "decode": 1}
            load.rate = 8.0
            await load.until(lambda it: it["present"]["prefill"] > 1)
            load.rate = 1.0
            await load.until(lambda it: it["present"]["prefill"] == 1 == it["wanted"]["prefill"])
            asking.cancel()
        assert load.failed == []
        assert load.num_done > 50
        assert "prefill-1 starts" in mesh.out
        assert "ends when it has finished what it holds" in mesh.out
        assert len(mesh.children) > 3


@pytest.mark.timeout(900)
async def test_it_decides_what_the_simulator_decides() -> None:
    """Ten minutes of one load on real processes and in the simulator: up by three, down again."""
    load = list(asks(RATES, SECONDS, seed=0))
    live = await run_live(load, SECONDS)
    simulated = run_simulated(load, SECONDS, live.startup_s)
    is_same, apart_s = compare(live, simulated)
    assert is_same, (live.changes, simulated.changes)
    assert apart_s <= 2 * LOOK_S
    assert {it.kind for it in live.changes} == {"prefill", "decode"}


async def test_who_only_advises_changes_nothing() -> None:
    """It says in /cluster and in metrics what it would do."""
    up = pdmesh("up", *MESH, "--planner", "advise", limit_s=LIMIT_S, **SLOW)
    async with (
        up as mesh,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url = await mesh.url()
        load = Load(session, url)
        load.rate = 8.0
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(load.run())
            told = await load.until(lambda it: it["wanted"].get("prefill", 0) > 1)
            assert any(order.startswith("add ") for order in told["orders"])
            assert told["present"]["prefill"] == 1
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            wanted = float(told["wanted"]["prefill"])
            assert f'pdmesh_gateway_workers_wanted{{role="prefill"}} {wanted}' in text
            asking.cancel()
        assert len(mesh.children) == 3
