"""A worker, put together: where its parts meet. Its ``LaunchProfile`` says what it does.

Nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from shared.address import Address
from shared.config import WorkerConfig
from shared.engine.base import Engine
from shared.engine.memory.staging import slots_of_a_way
from shared.engine.worker import ComputeRunner
from shared.home import Home, Role
from shared.ids import Incarnation, new_incarnation
from shared.kv.journal import Journal, Tier
from shared.kv.pool import BlockPool
from shared.kv.prefix_hash import UNIT
from shared.kv.tiers import CachePolicy
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.runtime.platform import Platform
from shared.schedule.budget import TBT_TARGET_S, StepBudget, TokenBudget, budget_of
from shared.schedule.queue_time import queue_left_s
from shared.schedule.scheduler import Scheduler
from shared.telemetry.trace_export import tracing
from shared.telemetry.tracing import Tracer
from shared.telemetry.worker import DecodeMetrics, PrefillMetrics, WorkerHoldings, WorkerMetrics
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES, TransferMode
from shared.transport.base import Transport
from shared.transport.pairing import PairRules
from shared.worker.arenas import Arena, DramArena
from shared.worker.core.lease import LeasePolicy
from shared.worker.core.leases import Leases
from shared.worker.disk_arena import DiskArena
from shared.worker.door import Door
from shared.worker.launch import LaunchProfile
from shared.worker.life import WorkerLife, WorkerParts, devices, pool_and_scheduler
from shared.worker.pairs import PairTable
from shared.worker.prefixes import PrefixFetches, PrefixSource
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver
from shared.worker.requests import Requests
from shared.worker.step_times import ProfileRange, StepTimes
from shared.worker.stepper import Stepper
from shared.worker.tier_moves import TierMoves
from shared.worker_status import WorkerStatus

_log = structlog.get_logger(__name__)


class MeshWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(
        self, config: WorkerConfig, launch: LaunchProfile, platform: Platform, engine: Engine
    ) -> None:
        self.launch = launch
        self.home = Home(launch.home)
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self._life = WorkerLife(
            launch.home, config, platform, engine, self.incarnation, launch.serves
        )
        self._open_metrics()
        self.step_times = StepTimes()
        self._budget: StepBudget = TokenBudget(config.max_step_tokens)
        self._batch_tokens = 0
        self.pool: BlockPool
        self.journal: Journal
        self.scheduler: Scheduler
        self.leases: Leases
        self.requests: Requests
        self.stepper: Stepper
        self.pairs: PairTable
        self.pusher: Pusher | None = None
        self.receiver: KvReceiver | None = None
        self.prefix_source: PrefixSource | None = None
        self.tiers: TierMoves | None = None
        self.door: Door

    def _open_metrics(self) -> None:
        """What a worker never does is counted, too, but nobody asks for the numbers."""
        if self.launch.home is Role.PREFILL:
            self.prompt_metrics = PrefillMetrics(self.load)
            registry = self.prompt_metrics.registry if self.launch.receives else None
            self.answer_metrics = DecodeMetrics(registry=registry)
        else:
            self.answer_metrics = DecodeMetrics(self.load)
            registry = self.answer_metrics.registry if self.launch.pushes else None
            self.prompt_metrics = PrefillMetrics(registry=registry)

    @property
    def _home_metrics(self) -> WorkerMetrics:
        """What is one worker's, whatever it does, is counted by the role it was launched for."""
        launched_for = self.launch.home
        return self.prompt_metrics if launched_for is Role.PREFILL else self.answer_metrics

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> bool:
        """Serve until ``stop`` is set (then drain), or until cancelled (then do not). Returns False
        if the drain limit came first.

        ready: called once with the worker's gRPC address. The engine stays the caller's to close.
        Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
        EngineFailed: the device failed."""
        name = f"pdmesh-{self.launch.home.name.lower()}"
        async with (
            tracing(name, self.incarnation) as tracer,
            devices(self._platform, self._engine) as (compute, transport),
        ):
            profile = await self._profile(compute, transport)
            self._open_books(profile)
            self._open_shells(profile, compute, transport, tracer)
            metrics = self._home_metrics
            metrics.holdings = lambda: self._holdings(transport)
            self.prompt_metrics.pairs = self.pairs.statistics
            with contextlib.ExitStack() as stack:
                loops = [self.stepper.run, self.requests.run, self.pairs.run]
                if self.tiers is not None:
                    stack.enter_context(contextlib.closing(self.tiers))
                    loops.append(self.tiers.run)
                if self.pusher is not None:
                    loops.append(self.pusher.run)
                if self.receiver is not None:
                    stack.enter_context(contextlib.closing(self.receiver))
                    await self.receiver.open()
                    loops.append(self.receiver.run)
                parts = WorkerParts(
                    servicers=[self.door.servicer, self.pairs.servicer],
                    door=self.door,
                    metrics=metrics,
                    load=self.load,
                    journal=self.journal,
                    loops=loops,
                    drain=lambda: self.requests.drain(self._config.drain_s),
                    why_not_ready=self._why_not_ready,
                    on_peers=self.pairs.set_peers,
                    on_pair=self.pairs.ask,
                    on_home=self._set_home,
                )
                return await self._life.run(parts, ready, stop)

    # --- putting it together ---------------------------------------------------------------------

    async def _profile(self, compute: ComputeRunner, transport: Transport) -> MachineProfile:
        """Measure what is not known: how long steps take, and what keeps the device busy."""
        config, launch = self._config, self.launch
        machine = UNMEASURED
        if launch.pushes and config.needs_profile:
            machine = await self._platform.profile(self._engine, compute, transport)
        wanted = ProfileRange(
            max_tokens=config.max_step_tokens if launch.pushes or launch.is_mixed else 0,
            max_rows=config.max_running if launch.receives or launch.is_mixed else 0,
            target_s=(config.tbt_target_s or TBT_TARGET_S) if self._is_by_time else 0.0,
            known=machine.samples,
        )
        await self.step_times.profile(self._engine, compute, self._platform.stopwatch, wanted)
        return machine

    def _open_books(self, profile: MachineProfile) -> None:
        config = self._config
        self._batch_tokens = (
            config.batch_tokens or profile.saturating_tokens or config.max_step_tokens
        )
        self._budget = self._step_budget()
        self.pool, self.scheduler = pool_and_scheduler(config, self._engine, budget=self._budget)
        self.journal = Journal(self.pool.block_size)
        self.pool.listen(self.journal, UNIT)
        self.leases = Leases(self.pool, LeasePolicy(max_leases=config.max_requests))
        self.requests = Requests(
            tasks=self.launch.tasks,
            scheduler=self.scheduler,
            pool=self.pool,
            leases=self.leases,
            spec=self._engine.spec,
            prompt_metrics=self.prompt_metrics,
            answer_metrics=self.answer_metrics,
            max_prompts=config.max_jobs,
            max_answers=config.max_requests,
            expect=self._engine.expect,
            on_change=self._life.changed,
        )

    @property
    def _is_by_time(self) -> bool:
        """Whether steps keep to a time beside answers."""
        return self.launch.is_mixed and not self._config.token_budget

    def _step_budget(self) -> StepBudget:
        config = self._config
        return budget_of(
            config.max_step_tokens,
            together=self._batch_tokens,
            pushes=self.launch.pushes,
            tbt_target_s=config.tbt_target_s if self._is_by_time else None,
            predict=self.step_times.predict,
            is_expecting=lambda: self.leases.is_expecting,
            has_answers=lambda: bool(self.requests.num_answers),
        )

    def _open_shells(
        self,
        profile: MachineProfile,
        compute: ComputeRunner,
        transport: Transport,
        tracer: Tracer,
    ) -> None:
        config, engine, life = self._config, self._engine, self._life
        self.stepper = Stepper(
            compute=compute,
            scheduler=self.scheduler,
            metrics=self.answer_metrics,
            prompt_metrics=self.prompt_metrics if self.launch.pushes else None,
            sink=self.requests,
            on_step=self.step_times.learn,
            look_ahead=config.look_ahead,
        )
        self.door = Door(self.requests, self.launch.home, self.incarnation, on_silent=life.rejoin)
        shares, mib = config.share_prefixes, config.staging_mib
        if self.launch.pushes or shares:
            self.pusher = Pusher(
                engine=engine,
                compute=compute,
                num_slots=slots_of_a_way(mib, for_prefixes=not self.launch.pushes),
                mode=TransferMode(config.transfer_mode),
                profile=profile,
                has_digest=config.exact or None,
            )
            self.prefix_source = PrefixSource(
                self.pool, self.pusher, self.requests.blocks_freed, shares=shares
            )
            self.pusher.on_pull = self.prefix_source.pulled
        if self.launch.receives or shares:
            self.receiver = KvReceiver(
                engine=engine,
                compute=compute,
                transport=transport,
                leases=self.requests.reservations,
                random_bytes=self._platform.random_bytes,
                num_slots=slots_of_a_way(mib, for_prefixes=not self.launch.receives),
            )
        prefixes: PrefixFetches | TierMoves | None = self._share_prefixes() if shares else None
        has_tiers = config.dram_cache or config.ssd_cache is not None
        if has_tiers and (self.launch.pushes or self.launch.is_mixed):  # it has prompts
            prefixes = self.tiers = self._open_tiers(compute, prefixes)
        self.pairs = PairTable(
            incarnation=self.incarnation,
            engine=engine,
            compute=compute,
            transport=transport,
            network=life.network,
            random_bytes=self._platform.random_bytes,
            source=self.pusher,
            sink=self.receiver,
            max_warm=config.warm_pairs,
            on_change=life.changed,
            # Who pushes prompts says how large groups are.
            group_bytes=(config.group_kib << 10 if self.launch.pushes else DEFAULT_MAX_FRAME_BYTES),
            rules=PairRules.of(config),
        )
        self.requests.connect(
            self.stepper,
            pusher=self.pusher,
            receiver=self.receiver,
            prefixes=prefixes,
            step_seconds=self.step_times.of,
            tracer=tracer,
        )

    def _share_prefixes(self) -> PrefixFetches:
        assert self.receiver is not None
        return PrefixFetches(
            self.requests.take_prefix,
            self.requests.cancel,
            self.scheduler,
            self.receiver,
            self._platform.random_bytes,
            self.stepper.changed,
        )

    def _open_tiers(self, compute: ComputeRunner, others: PrefixFetches | None) -> TierMoves:
        config, engine = self._config, self._engine
        arenas: list[Arena] = []
        if config.dram_cache:
            arenas.append(DramArena(engine, compute, config.dram_cache))
        if config.ssd_cache is not None:
            size, threads = config.ssd_cache_size, self._platform.new_thread
            arenas.append(DiskArena(engine, compute, config.ssd_cache, size, threads))
        return TierMoves(
            arenas,
            CachePolicy(config.cache_policy),
            pool=self.pool,
            scheduler=self.scheduler,
            journal=self.journal,
            metrics=self._home_metrics,
            predict=self.step_times.predict,
            others=others,
            on_blocks=self.requests.blocks_freed,
            on_end=self.stepper.changed,
        )

    def _set_home(self, order: Home) -> None:
        before = self.home
        self.home = before.after(order, self.launch.serves)
        what = "home kept" if self.home is before else "home changed"
        _log.info(what, home=self.home.role.value, epoch=self.home.epoch, asked=order.epoch)
        self._life.changed()

    # --- looking at it ---------------------------------------------------------------------------

    def load(self) -> WorkerStatus:
        """What this worker is busy with now."""
        prompt_steps, answer_steps = self.step_times.fits()
        scheduled, leased = self.scheduler.statistics(), self.leases.statistics()
        own = (self.incarnation,) if self.launch.is_mixed else ()
        speeds = self.pairs.speeds
        token_s = {} if self.tiers is None else self.tiers.token_s
        return WorkerStatus(
            pending_tokens=scheduled.pending_tokens,
            num_waiting=scheduled.num_waiting + leased.num_waiting,
            num_running=scheduled.num_running + scheduled.num_held,
            free_blocks=self.pool.num_available,
            reserved_blocks=self.pool.num_held - leased.num_quarantined_blocks,
            quarantined_blocks=leased.num_quarantined_blocks,
            step_s=self.stepper.step_s,
            is_draining=self.requests.is_draining,
            paired=frozenset((*own, *speeds)),
            speeds=speeds,
            egress_bytes=0 if self.pusher is None else self.pusher.core.pending_bytes,
            num_prompts=self.requests.num_prompts,
            num_answers=self.requests.num_answers,
            home=self.home.role,
            home_epoch=self.home.epoch,
            queue_s=self._queue_s(),
            step_tokens=self._config.max_step_tokens,
            batch_tokens=self._batch_tokens,
            max_running=self._config.max_running,
            prompt_steps=prompt_steps,
            answer_steps=answer_steps,
            home_order=self.home.order,
            num_taken=self.requests.num_taken,
            dram_token_s=token_s.get(Tier.DRAM, 0.0),
            ssd_token_s=token_s.get(Tier.SSD, 0.0),
        )

    def _queue_s(self) -> float:
        """Predict when every prompt that is here now is computed, the running step's share done."""
        if not self.scheduler.has_prompts:
            return 0.0
        running, done_s = self.stepper.running(), 0.0
        if running is not None and running[0].num_prefill_tokens:
            plan, elapsed_s = running
            done_s = min(elapsed_s, self.step_times.of(plan))
        unfinished = self.scheduler.unfinished
        return queue_left_s(unfinished, self._budget, self.step_times.predict, done_s)

    def _why_not_ready(self) -> str:
        if self.launch.is_mixed:
            return ""  # it needs nobody
        return self.pairs.not_ready_reason

    def _holdings(self, transport: Transport) -> WorkerHoldings:
        transfers, free_slots = 0, 0
        if self.pusher is not None:
            out = self.pusher.core.statistics()
            transfers, free_slots = out.num_transfers, out.num_free_slots
        if self.receiver is not None:
            into = self.receiver.core.statistics()
            transfers += into.num_waiting + into.num_live + into.num_settling
            free_slots += into.num_free_slots
        return WorkerHoldings(
            sessions=len(self.door.sessions),
            endpoints=transport.num_endpoints,
            transfers=transfers,
            free_slots=free_slots,
            tasks=len(asyncio.all_tasks()),
        )
