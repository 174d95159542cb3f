"""The prefill loop: plan -> run -> commit, and the jobs that flow through it.

Each job is one attempt's prompt: its tokens are computed in chunks, its KV is pushed while they
are, its first token goes to the gateway the moment it is sampled. What happens to a job is decided
by ``core/jobs.py`` (its life) and ``shared/schedule`` (its steps); this shell performs their
effects. It is woken by events and never polls. It knows no wire format: a job's events go to its
``JobSink``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import structlog

from services.prefill.core.jobs import (
    AbortPush,
    Effect,
    Job,
    JobEvent,
    ReleaseBlocks,
    ReportDone,
    ReportFailed,
    StopCompute,
)
from services.prefill.pusher import PlannedSpan, Pusher, PushHandle, PushStats
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import DeadlinePassed, MeshError, ShuttingDown
from shared.failpoints import failpoint
from shared.ids import Incarnation, RequestId
from shared.kv.pool import BlockPool
from shared.request import FinishReason, WorkItem
from shared.schedule.admission import Duty, require_admissible
from shared.schedule.plan import NewToken, PromptTimes, StepPlan
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import CANCELLED, NO_TRACER, Phases, Tracer, TraceSpan, Value
from shared.telemetry.worker import MovingMean, PrefillMetrics, WorkerLoad
from shared.transfer.messages import TransferKey

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """One attempt to prefill. decode: where the KV goes, None = nowhere. deadline_at: loop time.
    trace_context: see ``tracing.TraceSpan.context``."""

    key: TransferKey
    item: WorkItem
    decode: Incarnation | None
    deadline_at: float | None
    trace_context: str = ""


class JobSink(Protocol):
    """Where one job's events go; every call returns at once."""

    def token(self, token: NewToken, times: PromptTimes) -> None:
        """The first token; at most once, before ``done``."""
        ...

    def done(self, stats: PushStats) -> None:
        """Nothing is left to do. Last call."""
        ...

    def failed(self, error: MeshError) -> None:
        """It will not be done. Last call."""
        ...

    def closed(self) -> None:
        """The job holds nothing any more; after ``done``, ``failed`` or a cancel."""
        ...


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A job and what it holds; identity is the object."""

    request_id: RequestId
    sequence: Sequence
    core: Job
    sink: JobSink
    push: PushHandle | None
    arrived_at: float
    span: TraceSpan
    phases: Phases
    started_at: float = 0.0
    stats: PushStats = field(default_factory=PushStats)
    deadline: asyncio.TimerHandle | None = None


class Stepper:
    """All jobs of this worker. ``run`` is the loop and owns every task.

    max_jobs: more at once are refused. on_change: the load has changed.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        compute: ComputeRunner,
        scheduler: Scheduler,
        pool: BlockPool,
        pusher: Pusher,
        max_jobs: int,
        paired: Callable[[], tuple[int, ...]] = lambda: (),
        on_change: Callable[[], None] = lambda: None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._scheduler = scheduler
        self._pool = pool
        self._pusher = pusher
        self._max_jobs = max_jobs
        self._paired = paired
        self._on_change = on_change
        self._tracer = tracer
        self.metrics = PrefillMetrics(self.load)
        self._step_s = MovingMean()
        self._jobs: dict[Sequence, PrefillJob] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._tasks: asyncio.TaskGroup | None = None

    # --- what intake asks ------------------------------------------------------------------------

    def submit(self, request: PrefillRequest, sink: JobSink) -> PrefillJob:
        """Take a job, or refuse it at once.

        Raises ShuttingDown, Overloaded, InvalidRequest (too long), NoCapacity (larger than the
        pool), WorkerLost (no link to that decode worker), DeadlinePassed."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        duty = Duty("prefill", len(self._jobs), self._max_jobs, self._is_draining)
        require_admissible(
            request.item, self._engine.spec, duty, deadline_at=request.deadline_at, now=now
        )
        sequence = Sequence(request.item)
        self._scheduler.add_prefill(sequence)
        note(Moment.QUEUED, request.key.request_id, num_tokens=len(request.item.token_ids))
        push: PushHandle | None = None
        if request.decode is not None:
            try:
                push = self._pusher.begin(
                    request.key,
                    request.decode,
                    num_tokens=len(request.item.token_ids),
                    block_table=lambda: sequence.block_table,
                )
            except MeshError:
                self._scheduler.release(sequence)
                raise
        core = Job(has_push=push is not None)
        span = self._tracer.within(request.trace_context)
        phases = Phases(span, "prefill.queue", now)
        job = PrefillJob(request.key.request_id, sequence, core, sink, push, now, span, phases)
        self._jobs[sequence] = job
        self._idle.clear()
        if request.deadline_at is not None:
            job.deadline = loop.call_at(request.deadline_at, self._deadline_passed, job)
        if push is not None:
            self._require_tasks().create_task(self._watch_push(job, push))
        self._changed()
        return job

    def cancel(self, job: PrefillJob) -> None:
        """Stop a job; its sink hears nothing but ``closed``. Allowed at any time, also twice."""
        self._handle(job, JobEvent.CANCELLED)

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Step until cancelled.

        Raises EngineFailed: every job has been failed with it; the process should end.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    plan = self._scheduler.plan()
                    self._note_plan(plan)
                    if plan.is_empty:
                        await self._wake.wait()
                        self._wake.clear()
                        continue
                    await self._step(plan)
            except MeshError as error:  # of the step alone: a job's own errors end in `_handle`
                self.fail_all(error)
                raise
            finally:
                self._tasks = None

    async def _step(self, plan: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        pushes = self._announce(plan)

        def layers_ready(num_layers: int) -> None:
            for push in pushes:
                push.layers_ready(num_layers)
            failpoint("prefill.mid_push")

        began_at = loop.time()
        results = await self._compute.step(plan.rows, layers_ready)
        step_s = loop.time() - began_at
        outcome = self._scheduler.commit(plan, results)
        for token in outcome.tokens:  # before all else: a client waits for each
            self._tell(token)
        done = self._compute.done
        for push in pushes:
            push.span_computed(done)
        for token in outcome.tokens:
            self._sampled(token)
        self._step_s.add(step_s)
        self.metrics.step_seconds.observe(step_s)
        self.metrics.step_rows.inc(len(plan.rows))
        self.metrics.step_tokens.inc(plan.num_prefill_tokens)
        self._on_change()

    def _note_plan(self, plan: StepPlan) -> None:
        now = asyncio.get_running_loop().time()
        for sequence in plan.admitted:
            job = self._jobs[sequence]
            job.started_at = now
            self._handle(job, JobEvent.ADMITTED)
            job.phases.turn("prefill.compute", now)
            self.metrics.queue_seconds.observe(now - job.arrived_at)
            self.metrics.prompt_tokens.inc(sequence.num_tokens)
            self.metrics.cached_tokens.inc(sequence.num_cached_tokens)
        for failure in plan.failed:
            self._handle(self._jobs[failure.sequence], JobEvent.FAILED, failure.error)

    def _announce(self, plan: StepPlan) -> list[PushHandle]:
        """Tell the pushes of this step what it computes; a prefix found in the cache goes first."""
        failpoint("prefill.before_first_frame")
        admitted = set(map(id, plan.admitted))
        spans: list[PlannedSpan] = []
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            job = self._jobs[sequence]
            note(Moment.PLANNED, job.request_id, start=row.start, stop=row.stop)
            push = job.push
            if push is None:
                continue
            if id(sequence) in admitted and row.start > 0:
                push.span(0, row.start, is_cached=True)
            spans.append((push, row.start, row.stop))
        self._pusher.step_planned(spans, self._engine.step_seconds(plan.rows))
        return [push for push, _, _ in spans]

    def _tell(self, token: NewToken) -> None:
        job = self._jobs[token.sequence]
        now = asyncio.get_running_loop().time()
        times = PromptTimes(
            queue_s=job.started_at - job.arrived_at,
            compute_s=now - job.started_at,
            cached_tokens=token.sequence.num_cached_tokens,
        )
        note(Moment.SAMPLED, job.request_id, seconds=times.compute_s)
        job.sink.token(token, times)
        tokens, cached = token.sequence.num_prompt_tokens, times.cached_tokens
        job.phases.end({"pdmesh.prompt_tokens": tokens, "pdmesh.cached_tokens": cached})

    def _sampled(self, token: NewToken) -> None:
        job = self._jobs[token.sequence]
        if job.push is None or token.finish_reason is not FinishReason.NONE:
            self._handle(job, JobEvent.SAMPLED_LAST)
            return
        failpoint("prefill.before_commit")
        self._handle(job, JobEvent.SAMPLED)
        note(Moment.COMMITTED, job.request_id)
        job.push.commit(token.token_id)

    # --- jobs ------------------------------------------------------------------------------------

    async def _watch_push(self, job: PrefillJob, push: PushHandle) -> None:
        try:
            job.stats = await push.wait()
        except MeshError as error:
            _trace_push(job, push, error=error.type)
            self._handle(job, JobEvent.PUSH_FAILED, error)
        else:
            _trace_push(job, push)
            note(Moment.ACKNOWLEDGED, job.request_id, num_frames=job.stats.num_frames)
            self.metrics.transferred(
                job.stats.num_bytes,
                transfer_s=job.stats.transfer_s,
                exposed_s=job.stats.exposed_s,
                lane=job.stats.lane,
            )
            self._handle(job, JobEvent.PUSH_DONE)
        self._handle(job, JobEvent.PUSH_SETTLED)

    def _deadline_passed(self, job: PrefillJob) -> None:
        self._handle(job, JobEvent.FAILED, DeadlinePassed("the deadline passed during prefill"))

    def _handle(self, job: PrefillJob, event: JobEvent, error: MeshError | None = None) -> None:
        for effect in job.core.handle(event, error):
            if isinstance(effect, StopCompute):
                job.phases.end(error=CANCELLED if error is None else error.type)
            self._perform(job, effect)

    def _perform(self, job: PrefillJob, effect: Effect) -> None:
        match effect:
            case StopCompute():
                self._scheduler.abort(job.sequence)
            case AbortPush(error):
                assert job.push is not None
                job.push.abort(error)
            case ReportDone():
                job.sink.done(job.stats)
            case ReportFailed(error):
                _log.info("prefill failed", type=error.type, error=error.message)
                job.sink.failed(error)
            case ReleaseBlocks():
                self._scheduler.release(job.sequence)
                self._close(job)
        self._changed()

    def _close(self, job: PrefillJob) -> None:
        del self._jobs[job.sequence]
        if job.deadline is not None:
            job.deadline.cancel()
        outcome = job.core.outcome
        self.metrics.requests.labels(outcome.value if outcome is not None else "none").inc()
        job.sink.closed()
        note(Moment.PREFILL_CLOSED, job.request_id, free_blocks=self._pool.num_available)
        if not self._jobs:
            self._idle.set()

    def _changed(self) -> None:
        self._wake.set()
        self._on_change()

    def _require_tasks(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise ShuttingDown("this prefill worker is not running")
        return self._tasks

    # --- ending ----------------------------------------------------------------------------------

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait until every push is acknowledged; False: the limit came first,
        the rest failed.
        """
        self._is_draining = True
        self._on_change()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self.fail_all(ShuttingDown("this prefill worker stopped before the prompt was done"))
            return False
        return True

    def fail_all(self, error: MeshError) -> None:
        """Fail every job that is not decided."""
        for job in list(self._jobs.values()):
            self._handle(job, JobEvent.FAILED, error)

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        """Jobs that hold something."""
        return len(self._jobs)

    def load(self) -> WorkerLoad:
        """What this worker is busy with now."""
        stats = self._scheduler.statistics()
        return WorkerLoad(
            pending_tokens=stats.pending_tokens,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running + stats.num_held,
            free_blocks=self._pool.num_available,
            reserved_blocks=self._pool.num_held,
            step_s=self._step_s.value,
            is_draining=self._is_draining,
            paired=self._paired(),
        )


def _trace_push(job: PrefillJob, push: PushHandle, *, error: str = "") -> None:
    """Report a transfer that is over, if anything was sent or should have been."""
    if not job.span.is_recording or not (push.num_frames or error):
        return
    began_at = job.arrived_at if push.first_sent_at is None else push.first_sent_at
    attributes: dict[str, Value] = {
        "pdmesh.bytes": push.num_bytes,
        "pdmesh.frames": push.num_frames,
        "pdmesh.lane": push.link.lane,
    }
    if not error:
        attributes |= {
            "pdmesh.mode": job.stats.mode,
            "pdmesh.exposed_s": job.stats.exposed_s,
            "pdmesh.overlap": job.stats.overlap,
        }
    job.span.phase("prefill.push", began_at, attributes, error=error)
