"""A prefill worker, put together: the one place where its parts meet.

    gateways ── Prefill.Session ── Intake ── Stepper ── Scheduler ── BlockPool
        └────── Registry.Join ── Membership     └── Pusher ── PairTable ── decode workers
                                     └── which decode workers there are ──┘

Nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from services.prefill.intake import Intake
from services.prefill.pairs import PairTable
from services.prefill.pusher import Pusher
from services.prefill.stepper import Stepper
from shared.address import Address
from shared.config import PrefillConfig
from shared.engine.base import Engine
from shared.ids import Incarnation, new_incarnation
from shared.kv.pool import BlockPool
from shared.rpc.join import Announcement, Membership, WorkerRole, advertised
from shared.runtime.loops import serve_until_stopped
from shared.runtime.platform import Platform
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.telemetry.listener import serve_metrics
from shared.telemetry.loop_lag import watch_loop_lag
from shared.telemetry.worker import WorkerHoldings
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES, TransferMode
from shared.version import VERSION

MIB = 1 << 20
FLUSH_S = 1.0
"""Longest wait for last words to reach the gateways."""


class PrefillWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(self, config: PrefillConfig, platform: Platform, engine: Engine) -> None:
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self.pool = BlockPool(
            engine.num_blocks,
            engine.block_size,
            model_key=engine.spec.fingerprint + engine.layout.digest,
            cache_prefixes=config.cache_prefixes,
        )
        self.scheduler = Scheduler(
            self.pool,
            SchedulePolicy(
                max_model_len=engine.spec.max_model_len,
                eos_token_ids=engine.spec.eos_token_ids,
                max_running=config.max_running,
                token_budget=config.token_budget,
            ),
        )
        self.stepper: Stepper | None = None
        self.pusher: Pusher | None = None

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> None:
        """See ``serve_prefill``."""
        config, platform, engine = self._config, self._platform, self._engine
        async with contextlib.AsyncExitStack() as stack:
            compute = platform.compute(engine)
            stack.push_async_callback(compute.close)
            transport = await platform.new_transport()
            stack.push_async_callback(transport.close)

            def changed() -> None:
                membership.report_soon()

            pusher = self.pusher = Pusher(
                engine=engine,
                compute=compute,
                num_slots=config.staging_mib * MIB // DEFAULT_MAX_FRAME_BYTES,
                mode=TransferMode(config.transfer_mode),
            )
            pairs = PairTable(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                network=platform.network,
                sink=pusher,
                random_bytes=platform.random_bytes,
                on_change=changed,
                group_bytes=config.group_kib << 10,
            )
            stepper = self.stepper = Stepper(
                engine=engine,
                compute=compute,
                scheduler=self.scheduler,
                pool=self.pool,
                pusher=pusher,
                max_jobs=config.max_jobs,
                paired=lambda: pairs.paired,
                on_change=changed,
            )
            intake = Intake(
                stepper,
                self.incarnation,
                VERSION,
                on_silent=lambda gateway: membership.doubt(gateway),
            )
            server = await stack.enter_async_context(
                platform.network.serve(Address(config.host, config.port), [intake.servicer])
            )
            membership = Membership(
                network=platform.network,
                gateways=config.gateways,
                announcement=Announcement(
                    role=WorkerRole.PREFILL,
                    incarnation=self.incarnation,
                    version=VERSION,
                    spec=engine.spec,
                    layout=engine.layout,
                    address=advertised(config.advertise, server.address),
                    num_blocks=engine.num_blocks,
                    block_size=engine.block_size,
                ),
                load=stepper.load,
                on_peers=pairs.set_peers,
                on_drain=stop.set,
                on_change=lambda: server.set_ready(not not_ready_reason()),
            )

            def holdings() -> WorkerHoldings:
                transfers = pusher.statistics()
                return WorkerHoldings(
                    sessions=intake.num_sessions,
                    endpoints=transport.num_endpoints,
                    transfers=transfers.num_transfers,
                    free_slots=transfers.num_free_slots,
                    tasks=len(asyncio.all_tasks()),
                )

            stepper.metrics.holdings = holdings

            def not_ready_reason() -> str:
                return membership.not_ready_reason or stepper.metrics.loop_lag.not_ready_reason

            def observe_loop_lag(lag_s: float) -> None:
                stepper.metrics.observe_loop_lag(lag_s)
                server.set_ready(not not_ready_reason())

            server.set_ready(False)  # until a gateway has taken this worker in
            await stack.enter_async_context(
                serve_metrics(
                    config.host,
                    config.metrics_port,
                    stepper.metrics.registry,
                    not_ready_reason,
                )
            )
            ready(server.address)
            await serve_until_stopped(
                [
                    stepper.run,
                    membership.run,
                    pairs.run,
                    pusher.run,
                    lambda: watch_loop_lag(observe_loop_lag, platform.stopwatch),
                ],
                stop=stop,
                drain=lambda: stepper.drain(config.drain_s),
                last_words=lambda: intake.flush(FLUSH_S),
            )


async def serve_prefill(
    config: PrefillConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run one prefill worker until ``stop`` is set (then it drains), or until cancelled (then it
    does not).

    ready: called once with the worker's gRPC address. The engine stays the caller's to close.
    Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
    EngineFailed: the device failed."""
    await PrefillWorker(config, platform, engine).run(ready, stop or asyncio.Event())
