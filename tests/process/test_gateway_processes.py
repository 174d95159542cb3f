"""Several gateway processes on one HTTP port: who answers, who joins, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.local import LocalMesh, local_mesh, plan_services, wait_for_pair
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from tests.support.command import run_pdmesh
from tests.support.service_process import free_port

pytestmark = pytest.mark.process

LIMIT_S = 60.0


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started and that live."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def ask(url: str) -> Any:
    """Ask over a connection of its own, so that the kernel chooses a process anew."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json(content_type=None) if response.status == 200 else None


async def incarnations(url: str, count: int) -> dict[str, int]:
    """Ask until so many processes have answered; return workers by incarnation."""
    found: dict[str, int] = {}
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            try:
                cluster = await ask(f"{url}/cluster")
            except aiohttp.ClientError:  # the queue of one that has just died
                continue
            found[cluster["gateway"]["incarnation"]] = len(cluster["workers"])
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of the process table holds: it tells nobody of its changes."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def two_processes(
    tmp_path: Path,
    *,
    process_port: int = 0,
    with_workers: bool = True,
    tenants: Path | None = None,
) -> AsyncIterator[LocalMesh]:
    """A mesh whose gateway is two processes."""
    gateway = GatewayConfig(
        http_port=0,
        grpc_port=0,
        mesh_port=0,
        gateway_processes=2,
        process_port=process_port,
        tenants=tenants,
        drain_s=5.0,
    )
    services = plan_services(
        gateway,
        [PrefillConfig(engine="fake")] if with_workers else [],
        [DecodeConfig(engine="fake")] if with_workers else [],
    )
    async with local_mesh(services, log=tmp_path / "log", restart=False) as mesh:
        yield mesh


async def test_every_process_of_one_port_serves_and_all_end_together(tmp_path: Path) -> None:
    """Both processes get connections of the one port, workers join both, and SIGTERM leaves none
    and exit code 0."""
    async with two_processes(tmp_path) as mesh:
        await wait_for_pair(mesh.http_url, LIMIT_S)
        found = await incarnations(mesh.http_url, 2)
        async with asyncio.timeout(LIMIT_S):
            while set(found.values()) != {2}:
                found = await incarnations(mesh.http_url, 2)
        answers = [await complete(mesh.http_url) for _ in range(8)]
        children = children_of(mesh.gateway.pid)
        assert len(children) == 2
        assert len(set(answers)) == 1
    assert mesh.gateway.exit_code == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


async def test_a_request_is_explained_whichever_process_answered(tmp_path: Path) -> None:
    """Each of several, by the command, which is not told of whom it has to ask."""
    async with two_processes(tmp_path) as mesh:
        await wait_for_pair(mesh.http_url, LIMIT_S)
        names: list[str] = []
        for _ in range(6):
            await complete(mesh.http_url, names)
        for name in names:
            told = await run_pdmesh("explain", name, "--url", mesh.http_url)
            assert f"request {name.removeprefix('cmpl-')}, ended" in told


async def complete(url: str, names: list[str] | None = None) -> str:
    """Return a greedy answer; retries while the chosen process has no pair of workers yet. names:
    what it is called goes there."""
    body = {"prompt": "one two", "max_tokens": 4, "temperature": 0}
    async with asyncio.timeout(LIMIT_S):
        while True:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/completions", json=body) as response,
            ):
                answer = await response.json()
                if response.status == 200:
                    if names is not None:
                        names.append(answer["id"])
                    return answer["choices"][0]["text"]


async def test_each_process_tells_its_own_metrics_at_a_port_of_its_own(tmp_path: Path) -> None:
    """The processes' second ports are always answered by one and the same of them."""
    port = free_port(2)
    async with two_processes(tmp_path, process_port=port, with_workers=False) as mesh:
        shared = set(await incarnations(mesh.http_url, 2))
        own = [await incarnations(f"http://127.0.0.1:{port + number}", 1) for number in (0, 1)]
        assert {name for found in own for name in found} == shared
        assert [await incarnations(f"http://127.0.0.1:{port + n}", 1) for n in (0, 1)] == own


async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    """After kill -9 of one there are two again, on the same port, and the log says so."""
    async with two_processes(tmp_path, with_workers=False) as mesh:
        before = set(await incarnations(mesh.http_url, 2))
        victim, survivor = children_of(mesh.gateway.pid)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in children_of(mesh.gateway.pid))
        await until(lambda: len(children_of(mesh.gateway.pid)) == 2)
        assert survivor in children_of(mesh.gateway.pid)
        now: set[str] = set()
        async with asyncio.timeout(LIMIT_S):
            while len(now - before) != 1:
                now |= set(await incarnations(mesh.http_url, 1))
        assert "a gateway process died" in (tmp_path / "log").read_text()
    assert mesh.gateway.exit_code == 0


async def test_a_death_is_told_with_its_own_reason(tmp_path: Path) -> None:
    """A file that is broken meanwhile keeps a replacement from starting, and the log says so; who
    is killed after that died of something else."""
    tenants, log = tmp_path / "tenants.toml", tmp_path / "log"
    tenants.touch()

    def deaths() -> list[str]:
        return [line for line in log.read_text().splitlines() if "gateway process died" in line]

    async with two_processes(tmp_path, with_workers=False, tenants=tenants) as mesh:
        victim, survivor = children_of(mesh.gateway.pid)
        tenants.write_text("[tenants.a]\nweight = 0\n")
        os.kill(victim, signal.SIGKILL)
        await until(lambda: any("weight" in line for line in deaths()))
        tenants.write_text("")
        await incarnations(mesh.http_url, 2)
        (again,) = set(children_of(mesh.gateway.pid)) - {survivor}
        count = len(deaths())
        os.kill(again, signal.SIGKILL)
        await until(lambda: len(deaths()) > count)
        assert "exit code -9" in deaths()[count]


async def test_none_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """After kill -9 of the parent its processes end by themselves."""
    async with two_processes(tmp_path, with_workers=False) as mesh:
        children = children_of(mesh.gateway.pid)
        os.kill(mesh.gateway.pid, signal.SIGKILL)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
