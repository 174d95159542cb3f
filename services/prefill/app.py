"""A prefill worker, put together: the one place where its parts meet.

    gateways ── Prefill.Session ── Intake ── Stepper ── Scheduler ── BlockPool
        └────── Registry.Join ── WorkerLife     └── Pusher ── PairTable ── decode workers
                                     └── which decode workers there are ──┘

Nothing here decides.
"""

from __future__ import annotations

import asyncio
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
from shared.profile.machine import UNMEASURED
from shared.rpc.join import WorkerRole
from shared.runtime.platform import Platform
from shared.runtime.worker import WorkerLife, WorkerParts, devices, pool_and_scheduler
from shared.schedule.budget import BatchBudget
from shared.schedule.scheduler import Scheduler
from shared.telemetry.tracing import tracing
from shared.telemetry.worker import PairSpeed, WorkerHoldings
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES, TransferMode
from shared.transport.pairing import PairRules
from shared.version import VERSION


class PrefillWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(self, config: PrefillConfig, platform: Platform, engine: Engine) -> None:
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self.pool: BlockPool
        self.scheduler: Scheduler
        self.stepper: Stepper | None = None
        self.pusher: Pusher | None = None

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> bool:
        """See ``serve_prefill``."""
        config, platform, engine = self._config, self._platform, self._engine
        life = WorkerLife(WorkerRole.PREFILL, config, platform, engine, self.incarnation)
        async with (
            tracing("pdmesh-prefill", self.incarnation, VERSION) as tracer,
            devices(platform, engine) as (compute, transport),
        ):
            profile = UNMEASURED
            if config.needs_profile:
                profile = await platform.profile(engine, compute, transport)
            most_tokens = config.max_step_tokens
            together = config.batch_tokens or profile.saturating_tokens or most_tokens
            budget = BatchBudget(most_tokens, together)
            self.pool, self.scheduler = pool_and_scheduler(config, engine, budget=budget)
            pusher = self.pusher = Pusher(
                engine=engine,
                compute=compute,
                num_slots=(config.staging_mib << 20) // DEFAULT_MAX_FRAME_BYTES,
                mode=TransferMode(config.transfer_mode),
                profile=profile,
                has_digest=config.exact or None,
            )
            pairs = PairTable(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                network=life.network,
                sink=pusher,
                random_bytes=platform.random_bytes,
                on_change=life.changed,
                group_bytes=config.group_kib << 10,
                rules=PairRules.of(config),
            )
            stepper = self.stepper = Stepper(
                engine=engine,
                compute=compute,
                scheduler=self.scheduler,
                pool=self.pool,
                pusher=pusher,
                max_jobs=config.max_jobs,
                paired=lambda: pairs.paired,
                on_change=life.changed,
                tracer=tracer,
            )
            intake = Intake(stepper, self.incarnation, VERSION, on_silent=life.doubt)

            def holdings() -> WorkerHoldings:
                transfers = pusher.statistics()
                return WorkerHoldings(
                    sessions=len(intake.sessions),
                    endpoints=transport.num_endpoints,
                    transfers=transfers.num_transfers,
                    free_slots=transfers.num_free_slots,
                    tasks=len(asyncio.all_tasks()),
                )

            def pair_speeds() -> list[PairSpeed]:
                return [
                    PairSpeed(
                        decode=str(pair.address),
                        lane=pair.lane,
                        bytes_per_s=pair.gbytes_per_s * 1e9,
                    )
                    for pair in pairs.statistics()
                ]

            stepper.metrics.holdings = holdings
            stepper.metrics.pairs = pair_speeds
            parts = WorkerParts(
                servicers=[intake.sessions.servicer],
                sessions=intake.sessions,
                metrics=stepper.metrics,
                load=stepper.load,
                loops=[stepper.run, pairs.run, pusher.run],
                drain=lambda: stepper.drain(config.drain_s),
                why_not_ready=lambda: pairs.not_ready_reason,
                on_peers=pairs.set_peers,
            )
            return await life.run(parts, ready, stop)


async def serve_prefill(
    config: PrefillConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Run one prefill worker until ``stop`` is set (then it drains), or until cancelled (then it
    does not). Returns False if the drain limit came first.

    ready: called once with the worker's gRPC address. The engine stays the caller's to close.
    Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
    EngineFailed: the device failed."""
    return await PrefillWorker(config, platform, engine).run(ready, stop or asyncio.Event())
