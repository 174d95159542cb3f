"""Many kinds of requests at once over real processes and the bundled model, with small pools, tiers
and roles that move, while workers are killed and stopped: every answer is the one that an
undisturbed worker gives.

What features do alone is shown elsewhere; this looks for what they do to each other.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.support.any_request import a_request, ask_all
from tests.support.grammars import needs_library
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx, needs_library]


class Mesh(NamedTuple):
    """A kind of mesh. workers: their roles; every, gateway: settings. has_tiers: below the pool."""

    workers: tuple[str, ...]
    every: dict[str, Any]
    gateway: dict[str, Any]
    has_tiers: bool = False


MESHES = {
    "apart, with tiers": Mesh(("prefill",) * 3 + ("decode",) * 2, {}, {}, True),
    "either": Mesh(("prefill", "prefill", "decode", "decode"), {"movable": True}, {}),
    "either, by pools": Mesh(
        ("prefill", "prefill", "decode", "decode"), {"movable": True}, {"policy": "splitwise"}
    ),
    "together": Mesh(("decode",) * 3, {"colocated": True}, {}, True),
}


async def disturb(
    mesh: ProcessMesh, url: str, workers: list[ServiceProcess], kind: Mesh, again: dict[str, Any]
) -> None:
    """Kill, stop and move workers, one after the other, until cancelled."""
    chance = random.Random(1)
    while True:
        await asyncio.sleep(chance.uniform(1.0, 3.0))
        worker = chance.choice(workers)
        match chance.choice(["kill", "stop", "move"]):
            case "kill":
                role = worker.name.split("-")[0]
                await worker.kill()
                workers.remove(worker)
                workers.append(await mesh.add(role, **again))
            case "stop":
                worker.send(signal.SIGSTOP)
                await asyncio.sleep(chance.choice([0.3, 3.0]))
                worker.send(signal.SIGCONT)
            case _ if kind.every.get("movable"):
                async with aiohttp.ClientSession() as session:
                    async with session.get(f"{url}/cluster") as response:
                        known = [it["incarnation"] for it in (await response.json())["workers"]]
                    home = {"role": chance.choice(["prompt", "token"])}
                    moved = f"{url}/cluster/workers/{chance.choice(known)}/role"
                    async with session.post(moved, json=home) as response:
                        await response.read()  # refused where it is the last of its role


async def has_pairs(mesh: ProcessMesh, gateway: ServiceProcess) -> bool:
    """Whether it takes requests."""
    return (await mesh.gauges(gateway))["pairs"] > 0


@pytest.mark.parametrize(
    ("name", "num_requests", "times"),
    [
        pytest.param("either, by pools", 25, 2, marks=pytest.mark.timeout(400)),
        *(
            pytest.param(name, 200, 8, marks=[pytest.mark.timeout(1800), pytest.mark.nightly])
            for name in MESHES
        ),
    ],
)
async def test_every_answer_is_the_undisturbed_one(
    tmp_path: Path, name: str, num_requests: int, times: int
) -> None:
    """Each is asked for several times, by ten clients at once, while workers come and go."""
    kind = MESHES[name]
    again = {**kind.every, "num_blocks": 300}
    if kind.has_tiers:
        again |= {"dram_cache": 40_000_000, "ssd_cache": tmp_path, "ssd_cache_size": 200_000_000}
    async with process_mesh("torch") as mesh:
        alone = await mesh.start_gateway(max_wait_s=60.0)
        await mesh.add("decode", colocated=True)
        await mesh.paired(alone, 1)
        due: dict[int, list[Any]] = {}
        url = f"http://127.0.0.1:{alone.facts['http_port']}"
        await ask_all(url, iter(range(num_requests)), due)
        mesh.gateway_names.clear()
        gateway = await mesh.start_gateway(max_wait_s=60.0, **kind.gateway)
        url = f"http://127.0.0.1:{gateway.facts['http_port']}"
        with mesh.explained():
            workers = [await mesh.add(role, **again) for role in kind.workers]
            await mesh.until(lambda: has_pairs(mesh, gateway))
            numbers = [*range(num_requests)] * times
            random.Random(2).shuffle(numbers)
            got: dict[int, list[Any]] = {}
            async with asyncio.TaskGroup() as tasks:
                disturbing = tasks.create_task(disturb(mesh, url, workers, kind, again))
                await ask_all(url, iter(numbers), got)
                disturbing.cancel()
            for number, (right,) in due.items():
                assert got[number] == [right] * times, a_request(number)
