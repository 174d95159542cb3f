"""A worker, put together: where its parts meet. Its ``LaunchProfile`` says what it does.

Nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shared.address import Address
from shared.config import WorkerConfig
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.ids import Incarnation, new_incarnation
from shared.kv.pool import BlockPool
from shared.membership.join import WorkerRole
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.runtime.platform import Platform
from shared.runtime.worker import WorkerLife, WorkerParts, devices, pool_and_scheduler
from shared.schedule.budget import BatchBudget, EitherBudget, StepBudget, TimeBudget, TokenBudget
from shared.schedule.scheduler import Scheduler
from shared.telemetry.tracing import Tracer, tracing
from shared.telemetry.worker import (
    DecodeMetrics,
    PairSpeed,
    PrefillMetrics,
    WorkerHoldings,
    WorkerLoad,
    WorkerMetrics,
)
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES, TransferMode
from shared.transport.base import Transport
from shared.transport.pairing import PairRules
from shared.version import VERSION
from shared.worker.core.lease import LeasePolicy
from shared.worker.core.leases import Leases
from shared.worker.core.life import Task
from shared.worker.dial import PairTable
from shared.worker.doors import AnswerDoor, Door, PromptDoor
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver
from shared.worker.requests import Requests
from shared.worker.step_times import StepTimes
from shared.worker.stepper import Stepper

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchProfile:
    """What a worker is launched for. home: what it is when nothing is asked of it. tasks: what it
    does; all of them = it may be either."""

    home: WorkerRole
    tasks: frozenset[Task]

    @property
    def may_be_either(self) -> bool:
        """Whether it does the work of both roles, and may change its home."""
        return self.pushes and self.receives

    @property
    def serves(self) -> tuple[WorkerRole, ...]:
        """The roles for which it takes orders."""
        return (WorkerRole.PREFILL, WorkerRole.DECODE) if self.may_be_either else (self.home,)

    @property
    def pushes(self) -> bool:
        """Whether it computes prompts for other workers."""
        return Task.PROMPT in self.tasks

    @property
    def receives(self) -> bool:
        """Whether it takes KV over."""
        return Task.ANSWER in self.tasks

    @property
    def is_mixed(self) -> bool:
        """Whether prompts and answers share its steps."""
        return Task.WHOLE in self.tasks


class MeshWorker:
    """One worker; ``run`` is its life. Everything else here is for tests and logs."""

    def __init__(
        self, launch: LaunchProfile, config: WorkerConfig, platform: Platform, engine: Engine
    ) -> None:
        self.launch = launch
        self.home, self.home_epoch = launch.home, 0
        self._config = config
        self._platform = platform
        self._engine = engine
        self.incarnation: Incarnation = new_incarnation(platform.random_bytes)
        self._life = WorkerLife(
            launch.home, config, platform, engine, self.incarnation, serves=launch.serves
        )
        self._open_metrics()
        self.step_times = StepTimes() if launch.is_mixed and not config.token_budget else None
        self.pool: BlockPool
        self.scheduler: Scheduler
        self.leases: Leases
        self.requests: Requests
        self.stepper: Stepper
        self.pairs: PairTable | None = None
        self.pusher: Pusher | None = None
        self.receiver: KvReceiver | None = None
        self.doors: list[Door] = []

    def _open_metrics(self) -> None:
        """What a worker never does is counted, too, but nobody asks for the numbers."""
        if self.launch.home is WorkerRole.PREFILL:
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
        return self.prompt_metrics if launched_for is WorkerRole.PREFILL else self.answer_metrics

    async def run(self, ready: Callable[[Address], None], stop: asyncio.Event) -> bool:
        """Serve until ``stop`` is set (then drain), or until cancelled (then do not). Returns False
        if the drain limit came first.

        ready: called once with the worker's gRPC address. The engine stays the caller's to close.
        Raises OSError: a port is in use. IncompatiblePeer: the gateway refuses this worker.
        EngineFailed: the device failed."""
        name = f"pdmesh-{self.launch.home.name.lower()}"
        async with (
            tracing(name, self.incarnation, VERSION) as tracer,
            devices(self._platform, self._engine) as (compute, transport),
        ):
            profile = await self._profile(compute, transport)
            self._open_books(profile)
            self._open_shells(profile, compute, transport, tracer)
            metrics = self._home_metrics
            metrics.holdings = lambda: self._holdings(transport)
            self.prompt_metrics.pairs = self._pair_speeds
            with contextlib.ExitStack() as stack:
                loops = [self.stepper.run, self.requests.run]
                servicers = [door.sessions.servicer for door in self.doors]
                if self.pairs is not None and self.pusher is not None:
                    loops += [self.pairs.run, self.pusher.run]
                if self.receiver is not None:
                    stack.enter_context(contextlib.closing(self.receiver))
                    await self.receiver.open()
                    loops.append(self.receiver.run)
                    servicers.append(self.receiver.servicer)
                parts = WorkerParts(
                    servicers=servicers,
                    sessions=[door.sessions for door in self.doors],
                    metrics=metrics,
                    load=self.load,
                    loops=loops,
                    drain=lambda: self.requests.drain(self._config.drain_s),
                    why_not_ready=self._why_not_ready,
                    on_peers=self.pairs.set_peers if self.pairs is not None else lambda _: None,
                    on_home=self._set_home,
                )
                return await self._life.run(parts, ready, stop)

    # --- putting it together ---------------------------------------------------------------------

    async def _profile(self, compute: ComputeRunner, transport: Transport) -> MachineProfile:
        """Measure what is not known: steps by time, and what keeps the device busy."""
        config = self._config
        if self.step_times is not None:
            await self.step_times.profile(
                self._engine,
                compute,
                self._platform.stopwatch,
                target_s=config.tbt_target_s,
                max_tokens=config.max_step_tokens,
            )
        if self.launch.pushes and config.needs_profile:
            return await self._platform.profile(self._engine, compute, transport)
        return UNMEASURED

    def _open_books(self, profile: MachineProfile) -> None:
        config = self._config
        self.pool, self.scheduler = pool_and_scheduler(
            config,
            self._engine,
            watermark_blocks=config.watermark_blocks,
            budget=self._budget(profile),
        )
        self.pool.listen(self._home_metrics.kv_changed)
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
            on_change=self._life.changed,
        )

    def _budget(self, profile: MachineProfile) -> StepBudget:
        """Return what bounds a step: prompts alone by what keeps the device busy, prompts beside
        answers by time."""
        config, most_tokens = self._config, self._config.max_step_tokens
        alone: StepBudget = TokenBudget(most_tokens)
        if self.launch.pushes:
            together = config.batch_tokens or profile.saturating_tokens or most_tokens
            alone = BatchBudget(most_tokens, together)
        if self.step_times is None:
            return alone
        beside = TimeBudget(
            self.step_times.predict,
            config.tbt_target_s,
            most_tokens,
            is_expecting=lambda: self.leases.is_expecting,
        )
        if not self.launch.pushes:
            return beside
        return EitherBudget(alone, beside, has_answers=lambda: bool(self.requests.num_answers))

    def _open_shells(
        self,
        profile: MachineProfile,
        compute: ComputeRunner,
        transport: Transport,
        tracer: Tracer,
    ) -> None:
        config, engine, life = self._config, self._engine, self._life
        rules = PairRules.of(config)
        self.stepper = Stepper(
            compute=compute,
            scheduler=self.scheduler,
            metrics=self.answer_metrics,
            prompt_metrics=self.prompt_metrics if self.launch.pushes else None,
            sink=self.requests,
            on_step=None if self.step_times is None else self.step_times.learn,
            look_ahead=config.look_ahead,
        )
        if self.launch.pushes:
            self.pusher = Pusher(
                engine=engine,
                compute=compute,
                num_slots=(config.staging_mib << 20) // DEFAULT_MAX_FRAME_BYTES,
                mode=TransferMode(config.transfer_mode),
                profile=profile,
                has_digest=config.exact or None,
            )
            self.pairs = PairTable(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                network=life.network,
                sink=self.pusher,
                random_bytes=self._platform.random_bytes,
                on_change=life.changed,
                group_bytes=config.group_kib << 10,
                rules=rules,
            )
            self._open_door(PromptDoor)
        if self.launch.receives:
            self.receiver = KvReceiver(
                incarnation=self.incarnation,
                version=VERSION,
                engine=engine,
                compute=compute,
                transport=transport,
                leases=self.requests.reservations,
                random_bytes=self._platform.random_bytes,
                num_slots=(config.staging_mib << 20) // DEFAULT_MAX_FRAME_BYTES,
                rules=rules,
                on_change=life.changed,
            )
            self._open_door(AnswerDoor)
        self.requests.connect(
            self.stepper,
            pusher=self.pusher,
            receiver=self.receiver,
            step_seconds=engine.step_seconds,
            tracer=tracer,
        )

    def _open_door(self, kind: type[Door]) -> None:
        self.doors.append(
            kind(self.requests, self.incarnation, VERSION, on_silent=self._life.rejoin)
        )

    def _set_home(self, home: WorkerRole, epoch: int) -> None:
        """Of two orders the one with the larger epoch counts; nothing in hand is touched by it."""
        if not self.launch.may_be_either:
            _log.warning("this worker has one role for good", asked=home.name.lower())
        elif epoch > self.home_epoch:
            self.home, self.home_epoch = home, epoch
            _log.info("home changed", home=home.name.lower(), epoch=epoch)
            self._life.changed()

    # --- looking at it ---------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """What this worker is busy with now."""
        scheduled, leased = self.scheduler.statistics(), self.leases.statistics()
        paired = self.pairs.paired if self.pairs is not None else ()
        own = (self.incarnation,) if self.launch.is_mixed else ()
        return WorkerLoad(
            pending_tokens=scheduled.pending_tokens,
            num_waiting=scheduled.num_waiting + leased.num_waiting,
            num_running=scheduled.num_running + scheduled.num_held,
            free_blocks=self.pool.num_available,
            reserved_blocks=self.pool.num_held - leased.num_quarantined_blocks,
            quarantined_blocks=leased.num_quarantined_blocks,
            step_s=self.stepper.step_s,
            is_draining=self.requests.is_draining,
            paired=(*own, *paired),
            num_prompts=self.requests.num_prompts_held,
            num_answers=self.requests.num_answers,
            home="prefill" if self.home is WorkerRole.PREFILL else "decode",
            home_epoch=self.home_epoch,
        )

    def _why_not_ready(self) -> str:
        if self.launch.is_mixed:
            return ""  # it needs nobody
        parts = [part for part in (self.pairs, self.receiver) if part is not None]
        return next((part.not_ready_reason for part in parts if part.not_ready_reason), "")

    def _holdings(self, transport: Transport) -> WorkerHoldings:
        transfers, free_slots = 0, 0
        if self.pusher is not None:
            out = self.pusher.statistics()
            transfers, free_slots = out.num_transfers, out.num_free_slots
        if self.receiver is not None:
            into = self.receiver.statistics()
            transfers += into.num_waiting + into.num_live + into.num_settling
            free_slots += into.num_free_slots
        return WorkerHoldings(
            sessions=sum(len(door.sessions) for door in self.doors),
            endpoints=transport.num_endpoints,
            transfers=transfers,
            free_slots=free_slots,
            tasks=len(asyncio.all_tasks()),
        )

    def _pair_speeds(self) -> list[PairSpeed]:
        return [
            PairSpeed(decode=str(pair.address), lane=pair.lane, bytes_per_s=pair.gbytes_per_s * 1e9)
            for pair in (self.pairs.statistics() if self.pairs is not None else ())
        ]
