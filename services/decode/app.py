"""A decode worker, put together: the one place where its parts meet.

    gateways ── Decode.Session ── Intake ── Reservations ── Leases ───────┐
        └────── Registry.Join ── WorkerLife      ├── Stepper ── Scheduler ── BlockPool
                          prefill workers ── KvReceiver

A colocated one is the same worker, which is its own prefill worker as well: it tells gateways that
it is paired with itself, and bounds its steps by time. Nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from services.decode.core.lease import LeasePolicy
from services.decode.core.leases import Leases
from services.decode.intake import Intake
from services.decode.receiver import KvReceiver
from services.decode.reservation import Reservations
from services.decode.step_times import StepTimes
from services.decode.stepper import Stepper
from shared.address import Address
from shared.config import DecodeConfig
from shared.engine.base import Engine
from shared.ids import Incarnation, new_incarnation
from shared.rpc.join import WorkerRole
from shared.runtime.platform import Platform
from shared.runtime.worker import WorkerLife, WorkerParts, devices, pool_and_scheduler
from shared.schedule.budget import StepBudget, TimeBudget
from shared.telemetry.tracing import tracing
from shared.telemetry.worker import DecodeMetrics, WorkerHoldings, WorkerLoad
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES
from shared.transport.pairing import PairRules
from shared.version import VERSION


class DecodeWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(self, config: DecodeConfig, platform: Platform, engine: Engine) -> None:
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self._life = WorkerLife(WorkerRole.DECODE, config, platform, engine, self.incarnation)
        self.step_times = StepTimes() if config.is_bound_by_time else None
        self.pool, self.scheduler = pool_and_scheduler(
            config, engine, watermark_blocks=config.watermark_blocks, budget=self._budget()
        )
        self.leases = Leases(self.pool, LeasePolicy(max_leases=config.max_requests))
        self.metrics = DecodeMetrics(self.load)
        self.reservations = Reservations(
            leases=self.leases,
            spec=engine.spec,
            metrics=self.metrics,
            max_requests=config.max_requests,
            on_change=self._life.changed,
        )
        self.intake = Intake(
            self.reservations,
            self.incarnation,
            VERSION,
            is_colocated=config.colocated,
            on_silent=self._life.doubt,
        )
        self.receiver: KvReceiver | None = None
        self._stepper: Stepper | None = None

    def _budget(self) -> StepBudget | None:
        times, config = self.step_times, self._config
        if times is None:
            return None
        return TimeBudget(
            times.predict,
            config.tbt_target_s,
            config.max_step_tokens,
            is_expecting=lambda: self.leases.is_expecting,
        )

    def load(self) -> WorkerLoad:
        """What this worker is busy with now."""
        scheduled, leased = self.scheduler.statistics(), self.leases.statistics()
        return WorkerLoad(
            pending_tokens=scheduled.pending_tokens,
            num_waiting=scheduled.num_waiting + leased.num_waiting,
            num_running=scheduled.num_running,
            free_blocks=self.pool.num_available,
            reserved_blocks=self.pool.num_held - leased.num_quarantined_blocks,
            quarantined_blocks=leased.num_quarantined_blocks,
            step_s=self._stepper.step_s if self._stepper is not None else 0.0,
            is_draining=self.reservations.is_draining,
            paired=(self.incarnation,) if self._config.colocated else (),
        )

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> bool:
        """See ``serve_decode``."""
        config, platform, engine = self._config, self._platform, self._engine
        async with (
            tracing("pdmesh-decode", self.incarnation, VERSION) as tracer,
            devices(platform, engine) as (compute, transport),
        ):
            stepper = self._stepper = Stepper(
                compute=compute,
                scheduler=self.scheduler,
                metrics=self.metrics,
                sink=self.reservations,
                on_step=None if self.step_times is None else self.step_times.learn,
                look_ahead=config.look_ahead,
            )
            if self.step_times is not None:
                await self.step_times.profile(
                    engine,
                    compute,
                    platform.stopwatch,
                    target_s=config.tbt_target_s,
                    max_tokens=config.max_step_tokens,
                )
            receiver = self.receiver = KvReceiver(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                leases=self.reservations,
                random_bytes=platform.random_bytes,
                num_slots=(config.staging_mib << 20) // DEFAULT_MAX_FRAME_BYTES,
                rules=PairRules.of(config),
                on_change=self._life.changed,
            )
            self.reservations.connect(receiver, stepper, tracer)

            def holdings() -> WorkerHoldings:
                transfers = receiver.statistics()
                return WorkerHoldings(
                    sessions=len(self.intake.sessions),
                    endpoints=transport.num_endpoints,
                    transfers=transfers.num_waiting + transfers.num_live + transfers.num_settling,
                    free_slots=transfers.num_free_slots,
                    tasks=len(asyncio.all_tasks()),
                )

            self.metrics.holdings = holdings
            parts = WorkerParts(
                servicers=[self.intake.sessions.servicer, receiver.servicer],
                sessions=self.intake.sessions,
                metrics=self.metrics,
                load=self.load,
                loops=[stepper.run, receiver.run],
                drain=lambda: self.reservations.drain(config.drain_s),
                why_not_ready=lambda: receiver.not_ready_reason,
            )
            with contextlib.closing(self.reservations), contextlib.closing(receiver):
                await receiver.open()
                return await self._life.run(parts, ready, stop)


async def serve_decode(
    config: DecodeConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Run one decode worker until ``stop`` is set (then it drains), or until cancelled (then it
    does not). Returns False if the drain limit came first.

    ready: called once with the worker's gRPC address. The engine stays the caller's to close.
    Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
    EngineFailed: the device failed."""
    return await DecodeWorker(config, platform, engine).run(ready, stop or asyncio.Event())
