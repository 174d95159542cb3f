"""A worker takes its pool's memory when it starts, not when requests come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.memory import maps_ahead
from tests.support.process_mesh import process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [
    pytest.mark.process,
    pytest.mark.ucx,
    pytest.mark.torch,
    pytest.mark.skipif(not maps_ahead(), reason="maps ahead since Linux 5.14"),
]


def anonymous_bytes(process: ServiceProcess) -> int:
    """Resident memory of a process that is no file's."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


async def test_an_idle_worker_holds_its_whole_pool() -> None:
    """It says so, and the system agrees; one with a small pool holds so much less."""
    async with process_mesh(engine="torch") as mesh:
        with mesh.explained():
            await mesh.start_gateway()
            sizes: list[int] = []
            for role, kv_gib in (("prefill", 0.01), ("decode", 0.26)):
                worker = await mesh.add(role, num_blocks=0, kv_gib=kv_gib)
                await worker.said("KV pool is resident")
                sizes.append(anonymous_bytes(worker))
    assert sizes[1] - sizes[0] > 0.23 * (1 << 30)


async def test_a_worker_that_is_stopped_meanwhile_ends_well() -> None:
    """Its pool takes seconds to map, and goes while a thread maps it."""
    async with process_mesh(engine="torch") as mesh:
        with mesh.explained():
            await mesh.start_gateway()
            worker = await mesh.add("decode", num_blocks=0, kv_gib=4)
            await worker.stop()
