"""Workers that must share memory, with real UCX: what they do on another lane, and say of it."""

from __future__ import annotations

import aiohttp
import pytest

from shared.errors import IncompatiblePeer
from shared.transport.pairing import require_shared_memory
from tests.support.process_mesh import ROLES, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess


@pytest.mark.parametrize("lane", ["sysv", "posix", "cma+tcp/lo", "cuda_ipc", "loopback"])
def test_a_lane_within_the_host_is_taken(lane: str) -> None:
    """Any part of a lane that is shared memory will do."""
    require_shared_memory(lane)


@pytest.mark.parametrize("lane", ["", "tcp/lo", "rc_mlx5/mlx5_0:1", "sysvx"])
def test_another_lane_is_refused(lane: str) -> None:
    """Everything else is refused, and the error says what to do."""
    with pytest.raises(IncompatiblePeer, match="ipc: service:ipc"):
        require_shared_memory(lane)


async def readiness(worker: ServiceProcess) -> tuple[int, str]:
    """Status and text of a worker's /ready."""
    url = worker.metrics_url.replace("/metrics", "/ready")
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def start_pair(mesh: ProcessMesh, strict: str, **settings: str) -> list[ServiceProcess]:
    return [
        await mesh.add(role, require_shared_memory=role == strict or strict == "both", **settings)
        for role in ROLES
    ]


@pytest.mark.process
@pytest.mark.ucx
@pytest.mark.parametrize("strict", ROLES)
async def test_a_pair_on_tcp_is_refused_by_whoever_must_share_memory(
    strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX was left only tcp: the strict worker is not ready, says why and what to do, and the
    gateway has no pair."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = await start_pair(mesh, strict)
            worker = workers[ROLES.index(strict)]

            async def says_why() -> bool:
                status, text = await readiness(worker)
                return status == 503 and "not through shared memory" in text

            await mesh.until(says_why)
            assert "tcp" in (await readiness(worker))[1]
            gauges = await mesh.gauges(gateway)
            assert gauges["pairs"] == 0
            assert gauges["ready"] == 0


@pytest.mark.process
@pytest.mark.ucx
async def test_a_pair_on_shared_memory_serves_workers_that_must_share_it() -> None:
    """On the usual lane strict workers are ready and answer."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = await start_pair(mesh, "both")
            await mesh.paired(gateway, 1)
            for worker in workers:
                assert await readiness(worker) == (200, "ready\n")
            answer = await mesh.ask(gateway, a_prompt(40), 8)
            answer.require_whole(8)
            assert answer.receipt["lane"] == "sysv"
            prefill = workers[ROLES.index("prefill")]
            # Silently falling back to whole messages would cost a factor, and no answer.
            assert any('"mode":"windows"' in line for line in prefill.log)
