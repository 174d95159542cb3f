"""What a worker says of itself to whoever asks whether it is ready."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from shared.address import Address
from shared.telemetry.loop_lag import INTERVAL_S
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import RunningWorker, WorkerMesh, launch_worker, worker_mesh

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


async def status(mesh: WorkerMesh, worker: RunningWorker) -> Any:
    async with mesh.network.at("probe").channel(Address(worker.host, 9000)) as channel:
        return (await HealthStub(channel).Check(HealthCheckRequest())).status


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@virtual_time
async def test_a_worker_whose_loop_stood_still_is_not_ready_until_it_turns_again(kind: str) -> None:
    """Its gRPC health follows the last look at the loop's lag."""
    async with worker_mesh() as mesh:
        worker = (mesh.prefills if kind == "prefill" else mesh.decodes)[0]
        assert await status(mesh, worker) == SERVING
        loop: Any = asyncio.get_running_loop()
        loop._jumping.now += 1.2  # time passes, nothing runs
        await asyncio.sleep(INTERVAL_S / 2)
        assert await status(mesh, worker) == NOT_SERVING
        await asyncio.sleep(2 * INTERVAL_S)
        assert await status(mesh, worker) == SERVING


@virtual_time
async def test_a_decode_worker_is_heard_of_only_when_its_staging_slots_stand() -> None:
    """A pair that came before them would be refused, and tried again only after a pause."""
    fabric = LoopbackFabric(LoopbackSettings(has_windows=True))
    async with asyncio.TaskGroup() as tasks:
        decode = await launch_worker(
            "decode",
            "decode-0",
            tasks,
            network=MemoryNetwork(host="gateway"),
            fabric=fabric,
            randomness=random.Random(1),
            num_blocks=64,
            block_size=16,
            timing=None,
            settings={"gateway": "gateway:8001", "staging_mib": 16},
        )
        offers, _ = decode.worker.receiver.windows
        assert offers
        assert decode.task is not None
        decode.task.cancel()
