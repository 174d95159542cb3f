"""All requests of one worker: prompts for others, answers with KV from others, and whole ones.

What happens to a request is decided by ``core/life.py`` (its life) and ``shared/schedule`` (its
steps); this shell performs their effects, tells the gateways and keeps deadlines. What an answer
has before its KV is here is ``reservations.py``'s. No wire format here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from shared.engine.worker import StepDone
from shared.errors import DeadlinePassed, LeaseLost, MeshError, RemoteProtocolError, ShuttingDown
from shared.failpoints import failpoint
from shared.ids import StreamId
from shared.kv.pool import BlockPool
from shared.model_spec import ModelSpec
from shared.request import FinishReason
from shared.runtime.groups import TaskGroup, plain_errors
from shared.runtime.loops import loop_time
from shared.schedule.admission import Duty, require_admissible
from shared.schedule.plan import Failure, NewToken, StepPlan
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import CANCELLED, NO_TRACER, Phases, Tracer
from shared.telemetry.worker import DecodeMetrics, PrefillMetrics
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order
from shared.worker.core.leases import Leases
from shared.worker.core.life import (
    AbortPush,
    CancelLease,
    Close,
    Effect,
    Life,
    LifeEvent,
    LifeOutcome,
    LifeState,
    ReportDone,
    ReportFailed,
    StopCompute,
    Task,
)
from shared.worker.grammar_waits import wait_for_grammar
from shared.worker.prefixes import PrefixFetches
from shared.worker.pusher import PlannedSpan, Pusher, PushHandle
from shared.worker.receiver import KvReceiver
from shared.worker.request import AskingGateway, Request
from shared.worker.reservations import Reservations
from shared.worker.stepper import Stepper
from shared.worker.tier_moves import TierMoves

_log = structlog.get_logger(__name__)

_WHEN = {Task.PROMPT: "prefill", Task.PREFIX: "the fetch of a prefix"}


class Requests:
    """The ``StepSink`` of the worker's stepper; ``reservations`` is its receiver's ``LeaseBook``.

    Call ``connect`` before any request comes. tasks: what this worker does. max_prompts,
    max_answers: more at once are refused. expect: ``Engine.expect``. on_change: of the load.
    """

    def __init__(
        self,
        *,
        tasks: frozenset[Task],
        scheduler: Scheduler,
        pool: BlockPool,
        leases: Leases,
        spec: ModelSpec,
        prompt_metrics: PrefillMetrics,
        answer_metrics: DecodeMetrics,
        max_prompts: int,
        max_answers: int,
        expect: Callable[[str], Future[Any]] = lambda _: Future(),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._tasks = tasks
        self._scheduler = scheduler
        self._pool = pool
        self._spec = spec
        self._prompt_metrics = prompt_metrics
        self._answer_metrics = answer_metrics
        self._max_prompts = max_prompts
        self._max_answers = max_answers
        self._expect = expect
        self._on_change = on_change
        self._prompts: dict[Request, None] = {}
        self._answers: dict[TransferKey, Request] = {}  # whole ones, too
        self._by_sequence: dict[TokenSequence, Request] = {}
        self.reservations = Reservations(
            leases,
            self._answers,
            vocab_size=spec.vocab_size,
            metrics=answer_metrics,
            handle=self._handle,
            joined=self._joined,
            on_change=on_change,
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._watchers: asyncio.TaskGroup | None = None
        self.is_draining, self.num_taken = False, 0

    def connect(
        self,
        stepper: Stepper,
        *,
        pusher: Pusher | None = None,
        receiver: KvReceiver | None = None,
        prefixes: PrefixFetches | TierMoves | None = None,
        step_seconds: Callable[[StepPlan], float] = lambda _: 0.0,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """Close the circle: all of these need this object, and this object needs them.

        step_seconds: predicts a step, 0 = unknown; it decides how KV is pushed.
        """
        self._stepper = stepper
        self.reservations.receiver, self.reservations.pusher = receiver, pusher
        self._pusher = pusher
        self._receiver = receiver
        self._prefixes = prefixes
        self._step_seconds = step_seconds
        self._tracer = tracer

    async def run(self) -> None:
        """Watch the pushes until cancelled, and the clock of the leases with them."""
        with plain_errors():
            async with TaskGroup() as tasks:
                self._watchers = tasks
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._watchers = None
                    self.reservations.close()

    # --- what gateways ask -----------------------------------------------------------------------

    def take(self, task: Task, order: Order, gateway: AskingGateway) -> Request | None:
        """Take a request; its first word may come before this returns. None: it has ended already.

        Raises MeshError: refused at once, ``gateway`` has heard nothing. ShuttingDown, Overloaded,
        InvalidRequest (too long), NoCapacity (larger than the pool), WorkerLost (no link to the
        worker that decodes it), DeadlinePassed; RemoteProtocolError: this worker does no such
        thing, or has this attempt already.
        """
        now = loop_time()
        try:
            self._require_admissible(task, order, now)
        except MeshError as error:
            if task is Task.ANSWER and order.key not in self._answers and self._receiver:
                self._receiver.abort(order.key, error)  # the prompt's worker opens all the same
            raise
        if task is Task.ANSWER:
            return self._reserve(order, gateway, Life(task), "decode.reserve", now)
        return self._compute(task, order, gateway, now)

    def _require_admissible(self, task: Task, order: Order, now: float) -> None:
        if task not in self._tasks:
            doing = "computes no prompts" if task is not Task.ANSWER else "takes no KV over"
            raise RemoteProtocolError(f"this worker {doing}", code="colocated")
        if task is Task.PROMPT:
            duty = Duty("prefill", len(self._prompts), self._max_prompts, self.is_draining)
        else:
            duty = Duty("decode", self.num_answers, self._max_answers, self.is_draining)
        deadline_at = None if order.deadline_s is None else now + order.deadline_s
        require_admissible(order.item, self._spec, duty, deadline_at=deadline_at, now=now)
        if order.item.sampling.grammar:
            self._expect(order.item.sampling.grammar)
        if task is not Task.PROMPT and order.key in self._answers:
            raise RemoteProtocolError("this attempt has a reservation already", code="reserved")

    def _reserve(
        self, order: Order, gateway: AskingGateway, life: Life, phase: str, now: float
    ) -> Request | None:
        request = self._begin(order, gateway, life, phase, now)
        self._answers[order.key] = request
        self.reservations.reserve(request, now)
        return request if self._answers.get(order.key) is request else None

    def _compute(self, task: Task, order: Order, gateway: AskingGateway, now: float) -> Request:
        sequence = TokenSequence(order.item)
        self.num_taken += 1
        push: PushHandle | None = None
        if task is Task.PROMPT:
            # First: what is larger than the pool is refused before the sink hears of it.
            self._scheduler.add_prefill(sequence)
            note(Moment.QUEUED, order.key.request_id, num_tokens=len(order.item.token_ids))
            try:
                push = self._begin_push(order, sequence)
            except MeshError:
                self._scheduler.release(sequence)
                raise
        else:
            self._scheduler.add(sequence)
        life = Life(task, has_push=push is not None)
        request = self._begin(order, gateway, life, "prefill.queue", now)
        request.sequence, request.push = sequence, push
        self._by_sequence[sequence] = request
        wait_for_grammar(sequence, self._expect, self._scheduler, self._stepper.changed)
        if task is Task.PROMPT:
            self._prompts[request] = None
        else:
            self._answers[order.key] = request
        if push is not None:
            assert self._watchers is not None
            self._watchers.create_task(self._watch_push(request, push))
        if self._prefixes is not None:
            self._prefixes.begin(request)
        self._stepper.changed()
        self._on_change()
        return request

    def take_prefix(self, order: Order, fetch: AskingGateway) -> Request | None:
        """Bring a prompt's beginning into the cache, from the worker that has it. None: see
        ``take``."""
        life = Life(Task.PREFIX)
        return self._reserve(order, fetch, life, "prefill.fetch", loop_time())

    def _begin_push(self, order: Order, sequence: TokenSequence) -> PushHandle | None:
        if order.peer is None:
            return None
        if self._pusher is None or self._watchers is None:
            raise ShuttingDown("this worker is not running")
        return self._pusher.begin(
            order.key,
            order.peer,
            num_tokens=len(order.item.token_ids),
            block_table=lambda: sequence.block_table,
        )

    def _begin(
        self, order: Order, gateway: AskingGateway, life: Life, phase: str, now: float
    ) -> Request:
        span = self._tracer.within(order.trace_context)
        request = Request(order, gateway, life, now, span, Phases(span, phase, now))
        self._idle.clear()
        if order.deadline_s is not None:
            request.deadline = asyncio.get_running_loop().call_later(
                order.deadline_s, self._deadline_passed, request
            )
        return request

    def cancel(self, request: Request, error: MeshError | None = None) -> None:
        """The gateway wants no more. Allowed at any time, also twice; it hears nothing but
        ``ended``. error: for the worker at a push's other end; None = the gateway tells it."""
        request.error = request.error or CANCELLED
        if error is None and request.task is Task.ANSWER:
            error = LeaseLost("the gateway cancelled the request", code="cancelled")
        self._handle(request, LifeEvent.CANCELLED, error)

    def _deadline_passed(self, request: Request) -> None:
        error = DeadlinePassed(f"the deadline passed during {_WHEN.get(request.task, 'decode')}")
        self._handle(request, LifeEvent.FAILED, error)

    # --- performing what a life decides ----------------------------------------------------------

    def _handle(self, request: Request, event: LifeEvent, error: MeshError | None = None) -> None:
        for effect in request.life.handle(event, error):
            self._perform(request, effect)

    def _perform(self, request: Request, effect: Effect) -> None:
        match effect:
            case ReportFailed(error):
                request.error = error.type
                _log.info(
                    "request failed",
                    task=request.task.value,
                    type=error.type,
                    error=error.message,
                )
                request.gateway.failed(request.order.stream_id, error)
            case ReportDone():
                request.gateway.pushed(request.order.stream_id, request.stats)
            case StopCompute():
                assert request.sequence is not None
                self._scheduler.abort(request.sequence)
                self._stepper.changed()
                if request.task is Task.PROMPT:
                    request.phases.end(error=request.error)
            case AbortPush(error):
                assert request.push is not None
                request.push.abort(error)
            case CancelLease(error):
                self.reservations.cancel(request, error)
            case Close():
                self._close(request)

    def _close(self, request: Request) -> None:
        """Forget a request that holds nothing, or whose blocks the scheduler gives back."""
        if request.task is Task.PROMPT:
            self._close_prompt(request)
        else:
            self._close_answer(request)
        if request.sequence is not None:
            del self._by_sequence[request.sequence]
        if request.deadline is not None:
            request.deadline.cancel()
        if request.prefix is not None and self._prefixes is not None:
            self._prefixes.leave(request)
        request.gateway.ended(request.order.stream_id)
        if not self._prompts and not self._answers:
            self._idle.set()
        self.blocks_freed()

    def blocks_freed(self) -> None:
        """What somebody held may be what others lack."""
        self._stepper.wake()
        self.reservations.grant_waiting()
        self._on_change()

    def _close_prompt(self, request: Request) -> None:
        assert request.sequence is not None
        del self._prompts[request]
        # The scheduler held its blocks for the push; an answer's went back with its last step.
        self._scheduler.release(request.sequence)
        outcome = request.life.outcome or LifeOutcome.CANCELLED
        self._prompt_metrics.requests.labels(outcome.value).inc()
        free_blocks = self._pool.num_available
        note(Moment.PREFILL_CLOSED, request.order.key.request_id, free_blocks=free_blocks)

    def _close_answer(self, request: Request) -> None:
        del self._answers[request.order.key]
        sequence = request.sequence
        if request.task is Task.PREFIX:
            request.phases.end(error=request.error)
            return
        if sequence is None:
            outcome = "not_joined"
            request.phases.end(error=request.error)
        else:
            cut = "cancelled" if request.error == CANCELLED else "failed"
            finish = sequence.finish_reason
            outcome = cut if finish is FinishReason.NONE else finish.name.lower()
            tokens = {"pdmesh.output_tokens": sequence.num_output_tokens}
            request.phases.end(tokens, error=request.error)
        self._answer_metrics.requests.labels(outcome).inc()
        note(Moment.DECODE_CLOSED, request.order.key.request_id, reason=outcome)

    async def _watch_push(self, request: Request, push: PushHandle) -> None:
        try:
            request.stats = stats = await push.wait()
        except MeshError as error:
            request.trace_push(error.type)
            # Its frames have the push, which keeps it.
            self._handle(request, LifeEvent.FAILED, error.with_traceback(None))
        else:
            request.trace_push()
            note(Moment.ACKNOWLEDGED, request.order.key.request_id, num_frames=stats.num_frames)
            self._prompt_metrics.transferred(
                stats.num_bytes,
                transfer_s=stats.transfer_s,
                exposed_s=stats.exposed_s,
                lane=stats.lane,
            )
            self._handle(request, LifeEvent.PUSHED)
        self._handle(request, LifeEvent.SETTLED)  # ignored unless it was cancelled or has failed

    def _joined(self, request: Request, sequence: TokenSequence) -> None:
        """All KV of an answer is here: it runs from the next step on."""
        request.sequence = sequence
        self._by_sequence[sequence] = request
        self._handle(request, LifeEvent.BEGUN)
        self._scheduler.add_ready(sequence)
        wait_for_grammar(sequence, self._expect, self._scheduler, self._stepper.changed)
        self._stepper.changed()

    # --- StepSink: the stepper's side ------------------------------------------------------------

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        now = loop_time()
        for sequence in sequences:
            request = self._by_sequence[sequence]
            if request.task is Task.ANSWER or request.started_at is not None:
                continue  # preempted before, and back
            request.started_at = now
            self._handle(request, LifeEvent.ADMITTED)
            request.phases.turn("prefill.compute", now)
            metrics = self._answer_metrics if request.task is Task.WHOLE else self._prompt_metrics
            metrics.queue_seconds.observe(now - request.arrived_at)
            metrics.prompt_tokens.inc(sequence.num_tokens)
            metrics.cached_tokens.inc(sequence.num_cached_tokens)

    def announce(self, plan: StepPlan) -> Sequence[PushHandle]:
        """See ``StepSink``. A prefix found in the cache is announced with the prompt's first row,
        for which the budget may have room only steps after the prompt got its blocks."""
        self.reservations.steps()
        if not self._prompts or not plan.num_prefill_tokens:
            return ()
        assert self._pusher is not None
        failpoint("prefill.before_first_frame")
        spans: list[PlannedSpan] = []
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            if not sequence.is_prefill_only:
                continue
            request = self._by_sequence[sequence]
            note(Moment.PLANNED, request.order.key.request_id, start=row.start, stop=row.stop)
            if request.push is None:
                continue
            if 0 < row.start == sequence.num_cached_tokens:
                request.push.cached(row.start)
            spans.append((request.push, row.start, row.stop))
        self._pusher.step_planned(spans, self._step_seconds(plan))
        return [push for push, _, _ in spans]

    def step_done(
        self, tokens: Sequence[NewToken], pushes: Sequence[PushHandle], done: StepDone | None
    ) -> None:
        by_gateway: dict[int, tuple[AskingGateway, list[tuple[StreamId, NewToken]]]] = {}
        turns: list[tuple[Request, NewToken]] = []  # of which the token is the first or the last
        for token in tokens:  # before all else: a client waits for each
            request = self._by_sequence[token.sequence]
            if request.life.state is LifeState.COMPUTING:
                request.tell_first(token, loop_time())
                turns.append((request, token))
            else:
                _, rows = by_gateway.setdefault(id(request.gateway), (request.gateway, []))
                rows.append((request.order.stream_id, token))
                if token.finish_reason is not FinishReason.NONE:
                    turns.append((request, token))
            if request.task is not Task.PROMPT:
                note(Moment.STEPPED, request.order.key.request_id, index=token.index)
        for gateway, rows in by_gateway.values():
            gateway.step_tokens(rows)
        for push in pushes:
            push.span_computed(done)
        # None is cancelled meanwhile: a session's end comes from its own task, in a later turn.
        for request, token in turns:
            if token.finish_reason is not FinishReason.NONE:
                self._handle(request, LifeEvent.ENDED)
            else:
                self._go_on(request, token)
        self.reservations.grant_waiting()

    def _go_on(self, request: Request, token: NewToken) -> None:
        """Token 1 is sampled and not the last one: here or elsewhere others follow."""
        if request.task is Task.WHOLE:
            self._handle(request, LifeEvent.BEGUN)
            self._on_change()
        elif request.push is None:
            self._handle(request, LifeEvent.ENDED)  # only one was wanted
        else:
            failpoint("prefill.before_commit")
            self._handle(request, LifeEvent.SAMPLED)
            note(Moment.COMMITTED, request.order.key.request_id)
            request.push.commit(token.token_id)

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._handle(self._by_sequence[failure.sequence], LifeEvent.FAILED, failure.error)

    def rests(self) -> None:
        self.reservations.rests()

    # --- ending ----------------------------------------------------------------------------------

    def fail_all(self, error: MeshError) -> None:
        """Fail every request that is not decided."""
        for request in [*self._prompts, *self._answers.values()]:
            self._handle(request, LifeEvent.FAILED, error)

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait until every answer has ended and every push is acknowledged;
        False: the limit came first, the rest failed."""
        self.is_draining = True
        self._on_change()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
                await self._stepper.quiet()
        except TimeoutError:
            self.fail_all(ShuttingDown("this worker stopped before its requests were done"))
            return False
        return True

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def num_prompts(self) -> int:
        """Prompts for other workers that hold something, and whole requests whose prompt is not
        computed yet."""
        return len(self._prompts) + sum(it.life.is_prompt for it in self._answers.values())

    @property
    def num_answers(self) -> int:
        """Answers, whole ones included, that hold something; prefixes are none."""
        return sum(it.task is not Task.PREFIX for it in self._answers.values())
