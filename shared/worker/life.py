"""What every worker is besides its work: a server, a member of every gateway's mesh, an operator's
door, and a life with an end.

``shared/worker/worker.py`` says what serves, runs and drains; nothing here knows what that is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from shared.address import Address
from shared.config import WorkerConfig
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.home import Home, Role
from shared.ids import Incarnation, MeshPeer
from shared.kv.journal import Journal
from shared.kv.pool import BlockPool
from shared.membership.join import Announcement, Registration, advertised
from shared.rpc.call_server import CallServer
from shared.rpc.service import Servicer
from shared.runtime.loops import serve_until_stopped
from shared.runtime.platform import Platform
from shared.schedule.budget import StepBudget
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.telemetry.listener import serve_metrics
from shared.telemetry.loop_lag import watch_loop_lag
from shared.telemetry.process import register_process_metrics
from shared.telemetry.worker import WorkerMetrics
from shared.transport.base import Transport
from shared.worker.door import Door
from shared.worker_status import WorkerStatus

FLUSH_S = 1.0
"""Longest wait for last words to reach the gateways."""

Loop = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """One worker, as ``WorkerLife`` needs it.

    loops: run until the end; the first one ends first. load: read for every status. drain: awaited
    after a stop. why_not_ready: one sentence, '' when its own parts are ready. journal: which
    prefixes are here, for gateways that ask. on_peers: the standing partners, whenever they have
    changed. on_pair: one more is needed. on_home: a gateway says what the worker is when nothing is
    asked of it, with the order's epoch and number.
    """

    servicers: Sequence[Servicer]
    door: Door
    metrics: WorkerMetrics
    load: Callable[[], WorkerStatus]
    loops: Sequence[Loop]
    drain: Callable[[], Awaitable[bool]]
    why_not_ready: Callable[[], str]
    journal: Journal
    on_peers: Callable[[Sequence[MeshPeer]], None]
    on_pair: Callable[[MeshPeer], None]
    on_home: Callable[[Home], None]


class WorkerLife:
    """A worker's place in the mesh. Made before its parts: they call ``changed`` and ``rejoin``."""

    def __init__(
        self,
        role: Role,
        config: WorkerConfig,
        platform: Platform,
        engine: Engine,
        incarnation: Incarnation,
        serves: tuple[Role, ...],
    ) -> None:
        """serves: the roles for which it takes orders."""
        self._role = role
        self._serves = serves
        self._config = config
        self._platform = platform
        self._engine = engine
        self._incarnation = incarnation
        self.network = platform.mesh_network(role.value, incarnation)
        self._registration: Registration | None = None
        self._server: CallServer | None = None
        self._parts: WorkerParts

    def changed(self) -> None:
        """The load or the readiness has changed: tell the gateways and whoever asks soon."""
        if self._registration is not None:
            self._registration.report_soon()
        self._show_readiness()

    def rejoin(self, gateway: Incarnation) -> None:
        """A gateway went silent on its session: join it anew."""
        if self._registration is not None:
            self._registration.rejoin(gateway)

    async def run(
        self, parts: WorkerParts, ready: Callable[[Address], None], stop: asyncio.Event
    ) -> bool:
        """Serve until ``stop``, then drain and end (False: the drain limit came first); cancelled:
        end without draining.

        ready: called once with the worker's gRPC address.
        Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
        EngineFailed: the device failed."""
        config, platform, engine = self._config, self._platform, self._engine
        self._parts = parts
        async with contextlib.AsyncExitStack() as stack:
            self._server = await stack.enter_async_context(
                self.network.serve(Address(config.host, config.port), parts.servicers)
            )
            registration = self._registration = Registration(
                network=self.network,
                gateways=config.gateways,
                announcement=Announcement(
                    role=self._role,
                    incarnation=self._incarnation,
                    spec=engine.spec,
                    layout=engine.layout,
                    address=advertised(config.advertise, self._server.address),
                    num_blocks=engine.num_blocks,
                    block_size=engine.block_size,
                    serves=self._serves,
                ),
                load=parts.load,
                seen=parts.door.seen,
                on_peers=parts.on_peers,
                on_pair=parts.on_pair,
                on_drain=stop.set,
                on_home=parts.on_home,
                on_change=self._show_readiness,
                journal=parts.journal,
            )
            register_process_metrics(parts.metrics.registry, self._role.value, self._incarnation)
            self._show_readiness()  # not ready until a gateway has taken this worker in

            def observe_loop_lag(lag_s: float) -> None:
                parts.metrics.observe_loop_lag(lag_s)
                self._show_readiness()

            async def last_words() -> None:
                await parts.door.flush(FLUSH_S)
                if parts.load().is_draining:
                    await registration.leave(FLUSH_S)

            await stack.enter_async_context(
                serve_metrics(
                    config.host, config.metrics_port, parts.metrics.registry, self._why_not_ready
                )
            )
            ready(self._server.address)
            work, *rest = parts.loops
            return await serve_until_stopped(
                [
                    work,
                    registration.run,
                    *rest,
                    lambda: watch_loop_lag(observe_loop_lag, platform.stopwatch),
                ],
                stop=stop,
                drain=parts.drain,
                last_words=last_words,
            )

    def _why_not_ready(self) -> str:
        if self._registration is None:
            return "starting"
        return (
            self._registration.not_ready_reason
            or self._parts.why_not_ready()
            or self._parts.metrics.why_blocked
        )

    def _show_readiness(self) -> None:
        if self._server is not None:
            self._server.set_ready(not self._why_not_ready())


@contextlib.asynccontextmanager
async def devices(
    platform: Platform, engine: Engine
) -> AsyncGenerator[tuple[ComputeRunner, Transport]]:
    """Open what a worker computes and moves KV with, for the length of the block."""
    async with contextlib.AsyncExitStack() as stack:
        compute = platform.compute(engine)
        stack.push_async_callback(compute.close)
        transport = await platform.new_transport()
        stack.push_async_callback(transport.close)
        yield compute, transport


def pool_and_scheduler(
    config: WorkerConfig,
    engine: Engine,
    *,
    budget: StepBudget,
) -> tuple[BlockPool, Scheduler]:
    """Return the books of an engine's KV blocks, and the scheduler on top. budget: of a step."""
    pool = BlockPool(
        engine.num_blocks,
        engine.block_size,
        model_key=engine.spec.fingerprint + engine.layout.digest,
        cache_prefixes=config.cache_prefixes,
    )
    policy = SchedulePolicy(
        max_model_len=engine.spec.max_model_len,
        eos_token_ids=engine.spec.eos_token_ids,
        max_running=config.max_running,
        budget=budget,
    )
    return pool, Scheduler(pool, policy)
