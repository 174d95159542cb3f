"""A decode worker, put together: the one place where its parts meet.

    gateways ── Decode.Session ── Generation ── Reservations ── Leases ───┐
        └────── Registry.Join ── Membership          ├── Stepper ── Scheduler ── BlockPool
                          prefill workers ── KvReceiver

Nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from services.decode.core.lease import LeasePolicy
from services.decode.core.leases import Leases
from services.decode.generation import Generation
from services.decode.receiver import KvReceiver
from services.decode.reservation import Reservations
from services.decode.stepper import Stepper
from shared.address import Address
from shared.config import DecodeConfig
from shared.engine.base import Engine
from shared.ids import Incarnation, new_incarnation
from shared.kv.pool import BlockPool
from shared.rpc.join import Announcement, Membership, WorkerRole, advertised
from shared.runtime.loops import serve_until_stopped
from shared.runtime.platform import Platform
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.telemetry.listener import serve_metrics
from shared.telemetry.loop_lag import watch_loop_lag
from shared.telemetry.worker import WorkerHoldings, WorkerLoad, WorkerMetrics
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES
from shared.version import VERSION

MIB = 1 << 20
FLUSH_S = 1.0
"""Longest wait for last words to reach the gateways."""


class DecodeWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(self, config: DecodeConfig, platform: Platform, engine: Engine) -> None:
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self.pool = BlockPool(
            engine.num_blocks,
            engine.block_size,
            model_key=engine.spec.fingerprint + engine.layout.digest,
            watermark_blocks=config.watermark_blocks,
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
        self.leases = Leases(self.pool, LeasePolicy(max_leases=config.max_requests))
        self.metrics = WorkerMetrics("decode", self.load)
        self.reservations = Reservations(
            leases=self.leases,
            spec=engine.spec,
            metrics=self.metrics,
            max_requests=config.max_requests,
            on_change=self._changed,
        )
        self.generation: Generation | None = None
        self.receiver: KvReceiver | None = None
        self._stepper: Stepper | None = None
        self._membership: Membership | None = None

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
        )

    def _changed(self) -> None:
        if self._membership is not None:
            self._membership.report_soon()

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> None:
        """See ``serve_decode``."""
        config, platform, engine = self._config, self._platform, self._engine
        async with contextlib.AsyncExitStack() as stack:
            compute = platform.compute(engine)
            stack.push_async_callback(compute.close)
            transport = await platform.new_transport()
            stack.push_async_callback(transport.close)
            stack.callback(self.reservations.close)
            stepper = self._stepper = Stepper(
                compute=compute,
                scheduler=self.scheduler,
                metrics=self.metrics,
                sink=self.reservations,
            )
            receiver = self.receiver = KvReceiver(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                leases=self.reservations,
                random_bytes=platform.random_bytes,
                num_slots=config.staging_mib * MIB // DEFAULT_MAX_FRAME_BYTES,
            )
            self.reservations.connect(receiver, stepper)
            generation = self.generation = Generation(
                self.reservations,
                self.incarnation,
                VERSION,
                on_silent=lambda gateway: membership.doubt(gateway),
            )
            server = await stack.enter_async_context(
                platform.network.serve(
                    Address(config.host, config.port), [generation.servicer, receiver.servicer]
                )
            )
            membership = self._membership = Membership(
                network=platform.network,
                gateways=config.gateways,
                announcement=Announcement(
                    role=WorkerRole.DECODE,
                    incarnation=self.incarnation,
                    version=VERSION,
                    spec=engine.spec,
                    layout=engine.layout,
                    address=advertised(config.advertise, server.address),
                    num_blocks=engine.num_blocks,
                    block_size=engine.block_size,
                ),
                load=self.load,
                on_drain=stop.set,
                on_change=lambda: server.set_ready(not not_ready_reason()),
            )

            def holdings() -> WorkerHoldings:
                transfers = receiver.statistics()
                return WorkerHoldings(
                    sessions=generation.num_sessions,
                    endpoints=transport.num_endpoints,
                    transfers=transfers.num_waiting + transfers.num_live + transfers.num_settling,
                    free_slots=transfers.num_free_slots,
                    tasks=len(asyncio.all_tasks()),
                )

            self.metrics.holdings = holdings

            def not_ready_reason() -> str:
                return membership.not_ready_reason or self.metrics.loop_lag.not_ready_reason

            def observe_loop_lag(lag_s: float) -> None:
                self.metrics.observe_loop_lag(lag_s)
                server.set_ready(not not_ready_reason())

            server.set_ready(False)  # until a gateway has taken this worker in
            await stack.enter_async_context(
                serve_metrics(
                    config.host,
                    config.metrics_port,
                    self.metrics.registry,
                    not_ready_reason,
                )
            )
            ready(server.address)
            await serve_until_stopped(
                [
                    stepper.run,
                    membership.run,
                    receiver.run,
                    lambda: watch_loop_lag(observe_loop_lag, platform.stopwatch),
                ],
                stop=stop,
                drain=lambda: self.reservations.drain(config.drain_s),
                last_words=lambda: generation.flush(FLUSH_S),
            )


async def serve_decode(
    config: DecodeConfig,
    platform: Platform,
    engine: Engine,
    ready: Callable[[Address], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Run one decode worker until ``stop`` is set (then it drains), or until cancelled (then it
    does not).

    ready: called once with the worker's gRPC address. The engine stays the caller's to close.
    Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
    EngineFailed: the device failed."""
    await DecodeWorker(config, platform, engine).run(ready, stop or asyncio.Event())
