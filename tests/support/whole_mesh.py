"""Gateways, prefill and decode workers in one process: everything of production but sockets, UCX,
threads and weights.

A whole mesh under virtual time, replayable from a seed. Clients speak gRPC to a gateway. At the end
of every mesh each pool must be exactly full and no request may be left anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.app import Gateway
from shared.address import Address
from shared.config import GatewayConfig
from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.runtime.platform import Platform
from shared.worker.worker import MeshWorker
from tests.support.grpc_client import Answer, ask
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.memory_network import MemoryNetwork
from tests.support.tiny_tokenizer import tiny_text_model
from tests.support.worker_mesh import MODEL, MemoryMesh, RunningWorker, launch_worker

GATEWAYS = "gateways"
"""The one name behind which workers find every gateway."""


@dataclass
class RunningGateway:
    """One gateway and the task that is its process."""

    host: str
    gateway: Gateway
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        return Address(self.host, 8001)

    @property
    def lives(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def mesh(self) -> Any:
        return self.gateway.mesh

    @property
    def members(self) -> Any:
        return self.gateway.members


@dataclass
class WholeMesh(MemoryMesh):
    """Made by ``whole_mesh``."""

    gateways: list[RunningGateway] = field(default_factory=list)
    start_worker: Callable[..., Coroutine[Any, Any, RunningWorker]] = field(init=False)
    start_gateway: Callable[[], Coroutine[Any, Any, None]] = field(init=False)

    async def ask(
        self, prompt: Sequence[int], max_tokens: int = 16, *, gateway: int = 0, **more: Any
    ) -> Answer:
        """Ask for one answer, as a client does; see ``grpc_client.ask``."""
        network, address = self.network.at("client"), self.gateways[gateway].address
        return await ask(network, address, prompt, max_tokens, **more)

    async def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        """Wait, in virtual time, until a condition holds."""
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        """Wait until every living gateway may use every pair that workers make by themselves, both
        ways where KV may flow both ways; a colocated worker is one with itself, too."""
        num_pairs = sum(
            _is_pair(source.worker, sink.worker) for source in self.workers for sink in self.workers
        )
        await self.until(
            lambda: all(
                running.members is not None and running.members.table.sides.num_pairs == num_pairs
                for running in self.gateways
                if running.lives
            )
        )

    async def idle(self) -> None:
        """Wait until nothing is held for anybody."""
        await self.until(lambda: self.is_idle)

    def assert_nothing_left(self) -> None:
        """Every block of every living worker is available, and no gateway holds a request."""
        self.assert_pools_full()
        for running in self.gateways:
            if not running.lives:
                continue
            counts = running.mesh.statistics
            assert (counts.num_running, counts.num_waiting) == (0, 0)
            table = running.members.table
            remembered = table.sides
            table.note_usability()
            assert table.sides == remembered
            for session in running.members.sessions.values():
                assert session.num_legs == 0, session.worker
                assert not any(session.worker.orders.values()), session.worker


def _is_pair(source: MeshWorker, sink: MeshWorker) -> bool:
    if source is sink:
        return source.launch.is_mixed
    return source.launch.pushes and sink.launch.receives and source.home.role is not sink.home.role


@contextlib.asynccontextmanager
async def whole_mesh(
    *,
    num_gateways: int = 1,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_blocks: int = 64,
    block_size: int = 16,
    gateway: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    timing: FakeTiming | None = None,
    model: FakeModel = MODEL,
    engine: type[FakeEngine] = FakeEngine,
    seed: int = 1,
) -> AsyncGenerator[WholeMesh]:
    """Run a mesh for the length of the block; entering waits until every pair is ready."""
    network = MemoryNetwork(host="client")
    fabric = LoopbackFabric(LoopbackSettings(latency_s=0.0005, bytes_per_s=1e9))
    source = random.Random(seed)
    mesh = WholeMesh(network, fabric)
    text = tiny_text_model()
    num_started = {"prefill": 0, "decode": 0}

    async with asyncio.TaskGroup() as tasks:

        async def start_worker(kind: str, **settings: Any) -> RunningWorker:
            settings = {**((prefill if kind == "prefill" else decode) or {}), **settings}
            host = f"{kind}-{num_started[kind]}"
            num_started[kind] += 1
            running = await launch_worker(
                kind,
                host,
                tasks,
                network=network,
                fabric=fabric,
                randomness=random.Random(source.random()),
                num_blocks=settings.pop("num_blocks", num_blocks),
                block_size=settings.pop("block_size", block_size),
                timing=settings.pop("timing", timing),
                model=settings.pop("model", model),
                engine_kind=engine,
                settings={"gateway": GATEWAYS, "staging_mib": 16, **settings},
            )
            (mesh.prefills if kind == "prefill" else mesh.decodes).append(running)
            return running

        async def start_gateway() -> None:
            host = f"gateway-{len(mesh.gateways)}"
            config = GatewayConfig(host="127.0.0.1", http_port=0, grpc_port=8001, **(gateway or {}))
            platform = Platform(
                network=network.at(host), random_bytes=random.Random(source.random()).randbytes
            )
            running = RunningGateway(host, Gateway(config, platform, text, {}))
            is_up = asyncio.Event()
            running.task = tasks.create_task(
                running.gateway.run(lambda *_: is_up.set(), running.stop)
            )
            mesh.gateways.append(running)
            network.fabric.set_name(GATEWAYS, [it.host for it in mesh.gateways if it.lives])
            await is_up.wait()

        mesh.start_worker = start_worker
        mesh.start_gateway = start_gateway
        for _ in range(num_gateways):
            await start_gateway()
        for _ in range(num_prefill):
            await start_worker("prefill")
        for _ in range(num_decode):
            await start_worker("decode")
        await mesh.ready()
        try:
            yield mesh
            await mesh.idle()
            mesh.assert_nothing_left()
        finally:
            text.close()
            for running in (*mesh.gateways, *mesh.prefills, *mesh.decodes):
                running.stop.set()
                if running.task is not None:
                    running.task.cancel()
