"""Prefill and decode workers in one process: memory network, loopback transport, fake engine, and
a fake gateway.

Nothing is mocked: these are the production shells and cores. At the end of every mesh its pools
must be exactly full.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.decode.role import decode_launch
from services.prefill.role import prefill_launch
from shared.address import Address
from shared.config import DecodeConfig, PrefillConfig
from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.ids import Incarnation
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.request import SamplingParams
from shared.runtime.platform import Platform
from shared.transport.pairing import CANARY_BYTES
from shared.worker.worker import MeshWorker
from tests.support.fake_gateway import FakeGateway, FakeRequest, fake_gateway
from tests.support.fake_reference import fake_continuation
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_compute import VirtualCompute, VirtualThread

MODEL = FakeModel(max_model_len=2048)
GATEWAY = Address("gateway", 8001)
OTHER_GATEWAY = Address("other-gateway", 8001)


@dataclass
class RunningWorker:
    """One worker and the task that is its process."""

    host: str
    worker: Any
    engine: FakeEngine
    transport_address: bytes
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None
    error: BaseException | None = None

    @property
    def incarnation(self) -> Incarnation:
        return self.worker.incarnation

    @property
    def pool(self) -> Any:
        return self.worker.pool

    @property
    def lives(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def num_transfers(self) -> int:
        """Transfers that are not settled at this end."""
        pusher, receiver = self.worker.pusher, self.worker.receiver
        num_open = 0 if pusher is None else pusher.core.statistics().num_transfers
        if receiver is not None:
            end = receiver.core.statistics()
            num_open += end.num_waiting + end.num_live + end.num_settling
        return num_open


@dataclass
class MemoryMesh:
    """Workers on one memory network and one loopback transport."""

    network: MemoryNetwork
    fabric: LoopbackFabric
    prefills: list[RunningWorker] = field(default_factory=list)
    decodes: list[RunningWorker] = field(default_factory=list)

    @property
    def workers(self) -> list[RunningWorker]:
        """Those that live."""
        return [running for running in (*self.prefills, *self.decodes) if running.lives]

    @property
    def is_idle(self) -> bool:
        """Whether no worker holds a block for anybody, and no transfer is unsettled."""
        return not any(it.pool.num_held or it.num_transfers for it in self.workers)

    async def kill(self, running: Any) -> None:
        """End a worker or gateway as SIGKILL does: its connections break, its transport is dead."""
        self.network.fabric.kill(running.host)
        if isinstance(running, RunningWorker):
            self.fabric.kill(running.transport_address)
        running.task.cancel()
        await asyncio.wait([running.task])

    def assert_pools_full(self) -> None:
        """No living worker holds anything."""
        for running in self.workers:
            assert_nothing_held(running.worker)


def assert_nothing_held(worker: Any) -> None:
    """Every block of a worker is free or only cached, every count holds, and nobody remembers a
    request."""
    pool = worker.pool
    assert pool.num_available == pool.num_blocks, repr(pool)
    worker.scheduler.check_integrity()
    pool.check_integrity([])
    worker.leases.check_integrity()
    assert not [name for name, held in _held_by(worker).items() if held]


def _held_by(worker: Any) -> dict[str, Any]:
    """What a worker has of requests and transfers, by its name."""
    requests, pusher, receiver = worker.requests, worker.pusher, worker.receiver
    held = {
        "prompts": requests._prompts,
        "answers": requests._answers,
        "sequences": requests._by_sequence,
        "leases": worker.leases._leases,
    }
    if pusher is not None:
        core, flows = pusher.core, pusher.core._flows.values()
        core.check_integrity()
        held |= {"handles": pusher._handles, "senders": core._senders, "ids out": core._by_id}
        held |= {"wishes out": core._queue._places, "lines out": core._queue._lines}
        held["flow out"] = any(it.num_in_flight or it.num_transfers for it in flows)
        held["prefixes out"] = worker.prefix_source.tables()
    if receiver is not None:
        core, flows = receiver.core, receiver.core._links.values()
        core.check_integrity()
        held |= {"block tables": receiver._block_tables, "receives": receiver._receives}
        held |= {"withdrawn": receiver._withdrawn, "opens": core._waiting, "ids in": core._by_id}
        held |= {"wishes in": core._queue._places, "lines in": core._queue._lines}
        held["flow in"] = any(flow.num_in_flight for _, flow in flows)
    prefixes = requests._prefixes
    if worker.tiers is not None:
        worker.tiers.check_integrity()
        held["loads"] = worker.tiers._core._loads
        prefixes = worker.tiers._others
    if prefixes is not None:
        held |= {"fetches": prefixes._core._fetches, "fetching": prefixes._requests}
    return held


@dataclass
class WorkerMesh(MemoryMesh):
    """Made by ``worker_mesh``; prefills[0] and decodes[0] are the pair that ``start`` takes."""

    gateway: FakeGateway = field(kw_only=True)
    other_gateway: FakeGateway = field(kw_only=True)
    launch: Callable[[str, str], Coroutine[Any, Any, RunningWorker]] = field(init=False)

    def start(
        self, prompt: Sequence[int], max_tokens: int = 8, *, p: int = 0, d: int = 0, **more: Any
    ) -> FakeRequest:
        """Start one request on a pair; ``sampling=`` overrides ``max_tokens``, ``by=`` the
        gateway."""
        sampling = more.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
        by: FakeGateway = more.pop("by", self.gateway)
        return by.start(
            prompt,
            sampling,
            prefill=self.prefills[p].incarnation,
            decode=self.decodes[d].incarnation,
            **more,
        )

    async def all_paired(self) -> None:
        """Wait until every pair is ready and every session is open."""
        for prefill in self.prefills:
            for decode in self.decodes:
                await self.gateway.paired(prefill.incarnation, decode.incarnation)
                await self.other_gateway.paired(prefill.incarnation, decode.incarnation)

    async def restart(self, p: int = 0) -> RunningWorker:
        """Start a prefill worker in the place of one that has ended; returns once it is paired."""
        host = f"{self.prefills[p].host}+"
        new = self.prefills[p] = await self.launch("prefill", host)
        for decode in self.decodes:
            await self.gateway.paired(new.incarnation, decode.incarnation)
        return new

    async def idle(self) -> None:
        """Wait until no worker holds a block for anybody."""
        await self.gateway.until(lambda: self.is_idle)

    @property
    def num_transfers(self) -> int:
        """Transfers that are not settled, at both ends, of the workers that live."""
        return sum(running.num_transfers for running in self.workers)


def expected(
    prompt: Sequence[int], num_tokens: int, params: SamplingParams | None = None
) -> list[int]:
    """Return the answer that an undisturbed engine gives."""
    return fake_continuation(prompt, num_tokens, params, model=MODEL)


def a_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random token ids; other seeds share no prefix."""
    source = random.Random(f"{num_tokens}/{seed}")
    return [source.randrange(1, MODEL.vocab_size) for _ in range(num_tokens)]


LONG_BYTES = random.Random(0).randbytes(64) * (CANARY_BYTES // 64)


def random_bytes_of(source: random.Random) -> Callable[[int], bytes]:
    """Long ones, of which only canaries are, are always the same: 4 MiB would take longer than the
    mesh."""

    def random_bytes(num: int) -> bytes:
        drawn = source.randbytes(min(num, 64))
        return drawn if num <= 64 else LONG_BYTES[:num]

    return random_bytes


_canaries: list[Any] = []


def new_buffer(num_bytes: int) -> Any:
    """Zeros that nobody has written: of a worker's 64 MiB of staging few pages are ever used. But
    canaries go where earlier ones have been: memory is slow to get."""
    if num_bytes != CANARY_BYTES:
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    for buffer in _canaries:
        if sys.getrefcount(buffer) == NOBODYS:
            return buffer
    _canaries.append(np.zeros(num_bytes, np.uint8))
    return _canaries[-1]


NOBODYS = 3
"""References to a buffer that only we have: the list's, the loop's and the question's."""


async def launch_worker(
    kind: str,
    host: str,
    tasks: asyncio.TaskGroup,
    *,
    network: MemoryNetwork,
    fabric: LoopbackFabric,
    randomness: random.Random,
    num_blocks: int,
    block_size: int,
    timing: FakeTiming | None,
    settings: dict[str, Any],
    model: FakeModel = MODEL,
    engine_kind: type[FakeEngine] = FakeEngine,
) -> RunningWorker:
    """Start a worker as a task, on a host of its own; returns once it serves.

    settings: its configuration, and as ``profile`` what its machine can do.
    """
    measured = settings.pop("profile", UNMEASURED)

    async def profile(*_: object) -> MachineProfile:
        return measured

    engine = engine_kind(
        model=model, num_blocks=num_blocks, block_size=block_size, timing=timing or FakeTiming()
    )
    engine.new_buffer = new_buffer
    transport = await fabric.open()

    async def new_transport() -> Any:
        return transport

    platform = Platform(
        network=network.at(host),
        new_transport=new_transport,
        compute=VirtualCompute,
        random_bytes=random_bytes_of(randomness),
        profile=profile,
        new_thread=VirtualThread,
    )
    fields = {"engine": "fake", "host": host, "port": 9000, "advertise": host, **settings}
    worker: Any
    if kind == "prefill":
        config = PrefillConfig(**fields)
        worker = MeshWorker(config, prefill_launch(config), platform, engine)
    else:
        decode_config = DecodeConfig(**fields)
        worker = MeshWorker(decode_config, decode_launch(decode_config), platform, engine)
    running = RunningWorker(host, worker, engine, transport.address, asyncio.Event())
    is_up = asyncio.Event()

    async def live() -> None:
        try:
            await worker.run(lambda _: is_up.set(), running.stop)
        except Exception as error:
            running.error = error
            is_up.set()

    running.task = tasks.create_task(live())
    await is_up.wait()
    if running.error is not None:
        raise running.error
    return running


@contextlib.asynccontextmanager
async def worker_mesh(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    prefill_block_size: int = 16,
    decode_block_size: int = 16,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    model: FakeModel = MODEL,
    timing: FakeTiming | None = None,
    fabric: LoopbackSettings | None = None,
    seed: int = 1,
    check: bool = True,
) -> AsyncIterator[WorkerMesh]:
    """Run workers and a fake gateway, all paired.

    fabric: the link once paired. check: pools must be full at the end.
    """
    network = MemoryNetwork(host="gateway")
    mesh_fabric = LoopbackFabric(LoopbackSettings(latency_s=0.0005, bytes_per_s=1e9))
    source = random.Random(seed)
    common: dict[str, Any] = {
        "gateway": f"{GATEWAY},{OTHER_GATEWAY}",
        "staging_mib": 16,
    }

    async with (
        asyncio.TaskGroup() as tasks,
        fake_gateway(network, GATEWAY) as gateway,
        fake_gateway(network.at("other-gateway"), OTHER_GATEWAY, incarnation=0x07E2) as other,
    ):
        mesh = WorkerMesh(network, mesh_fabric, gateway=gateway, other_gateway=other)

        async def launch(kind: str, host: str) -> RunningWorker:
            is_prefill = kind == "prefill"
            num_blocks = prefill_blocks if is_prefill else decode_blocks
            block_size = prefill_block_size if is_prefill else decode_block_size
            return await launch_worker(
                kind,
                host,
                tasks,
                network=network,
                fabric=mesh_fabric,
                randomness=random.Random(source.random()),
                num_blocks=num_blocks,
                block_size=block_size,
                model=model,
                timing=timing,
                settings={**common, **((prefill if kind == "prefill" else decode) or {})},
            )

        for index in range(num_prefill):
            mesh.prefills.append(await launch("prefill", f"prefill-{index}"))
        for index in range(num_decode):
            mesh.decodes.append(await launch("decode", f"decode-{index}"))
        mesh.launch = launch
        await mesh.all_paired()
        if fabric is not None:
            mesh_fabric.settings = fabric  # canaries need a link of ordinary speed
        yield mesh
        if check:
            await mesh.idle()
            mesh.assert_pools_full()
        for running in (*mesh.prefills, *mesh.decodes):
            running.stop.set()
            if running.task is not None and not running.task.done():
                running.task.cancel()
