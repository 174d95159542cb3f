"""One worker of cores alone: scheduler, block pool, leases, lives, both ends of transfers. No
asyncio, socket, task or thread: a heap of events is all that moves.

What stands here is what the shells of ``shared/worker`` perform, and nothing that decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from services.sim.clock import WIRE_S, CountedBytes, EventClock
from services.sim.engine import DoneWork, SimEngine
from shared.errors import InvariantViolated, MeshError, TransferFailed
from shared.ids import Incarnation, StreamId
from shared.kv.layout import KvLayout
from shared.kv.pool import BlockPool
from shared.model_spec import ModelSpec
from shared.request import FinishReason, WorkItem
from shared.schedule.plan import NewToken, StepPlan
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.schedule.sequence import Sequence
from shared.transfer import effects as transfer
from shared.transfer.effects import ReceiverEffect, SenderEffect
from shared.transfer.messages import LinkId, SinkMessage, SourceMessage, TransferKey
from shared.transfer.plan import FrameRule, PushMode
from shared.transfer.receivers import Receivers, TagRanges
from shared.transfer.senders import Senders
from shared.worker.core.lease import (
    AbortReceive,
    GrantLease,
    Lease,
    LeasePolicy,
    LeaseState,
    Refuse,
    RefuseOpen,
)
from shared.worker.core.lease import Effect as LeaseEffect
from shared.worker.core.leases import Leases
from shared.worker.core.life import (
    AbortPush,
    CancelLease,
    Close,
    Life,
    LifeEvent,
    LifeState,
    ReportDone,
    ReportFailed,
    StopCompute,
    Task,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Limits of a worker. num_slots, frame_bytes: staging of transfers. link_bytes_s: bandwidth
    with which it sends, one frame after the other; 0 = a frame takes no time."""

    num_blocks: int
    block_size: int = 16
    max_running: int = 256
    token_budget: int = 2048
    num_slots: int = 8
    frame_bytes: int = 64 << 20
    link_bytes_s: float = 0.0


class CoreOrder(NamedTuple):
    """What a gateway asks of a worker. peer: at the other end of its KV, if that moves."""

    stream_id: StreamId
    task: Task
    key: TransferKey
    item: WorkItem
    peer: Incarnation | None
    wait_s: float


class Word(NamedTuple):
    """What a worker tells the gateway of an order; what: the event's name."""

    stream_id: StreamId
    task: Task
    what: str
    token: NewToken | None = None
    error: MeshError | None = None


@dataclass(eq=False)
class SimJob:
    """An order that holds something."""

    order: CoreOrder
    life: Life
    sequence: Sequence | None = None
    lease: Lease | None = None


class StagedFrame(NamedTuple):
    """A frame in a staging slot of the sink."""

    order: transfer.GatherAndSend
    payload: object


class CoreWorker:
    """One worker, for prompts, answers and whole requests alike. tell: a word to the gateway."""

    def __init__(
        self,
        incarnation: int,
        clock: EventClock,
        spec: ModelSpec,
        layout: KvLayout,
        engine: SimEngine,
        tell: Callable[[CoreWorker, Word], None],
        *,
        size: WorkerSize,
    ) -> None:
        self.incarnation = Incarnation(incarnation)
        self.clock = clock
        self.is_alive = True
        self.engine = engine
        self.pool = BlockPool(size.num_blocks, size.block_size)
        policy = SchedulePolicy(
            max_model_len=spec.max_model_len,
            eos_token_ids=spec.eos_token_ids,
            max_running=size.max_running,
            token_budget=size.token_budget,
        )
        self.scheduler = Scheduler(self.pool, policy)
        self.leases = Leases(self.pool, LeasePolicy())
        random_bytes = CountedBytes(incarnation)
        self.senders = Senders(num_slots=size.num_slots)
        self.receivers = Receivers(
            num_slots=size.num_slots,
            tags=TagRanges(random_bytes),
            random_bytes=random_bytes,
            window=size.num_slots // 2,
        )
        self.rule = FrameRule(layout=layout, group_bytes=1, max_frame_bytes=size.frame_bytes)
        self._num_layers = layout.num_layers
        self._byte_s = 1 / size.link_bytes_s if size.link_bytes_s else 0.0
        self._link_free_at = 0.0
        self.jobs: dict[tuple[TransferKey, Task], SimJob] = {}
        self.num_frames_sent = 0
        self.work = DoneWork()
        self._tell = tell
        self._jobs_of: dict[Sequence, SimJob] = {}
        self._sinks: dict[Incarnation, LinkId] = {}
        self._others: dict[LinkId, CoreWorker] = {}
        self._receives: dict[tuple[LinkId, int], transfer.PostReceive] = {}
        self._landed: dict[int, StagedFrame] = {}
        self._todo: deque[SenderEffect | ReceiverEffect] = deque()
        self._is_performing = False
        self._is_stepping = False

    # --- pairs ------------------------------------------------------------------------------------

    def pair(self, sink: CoreWorker, link: LinkId) -> None:
        """From now on this worker may push to that one."""
        self._sinks[sink.incarnation] = link
        self._others[link] = sink
        sink._others[link] = self
        self.senders.link_up(link, self.rule)
        sink.receivers.link_up(link, self.incarnation, self.rule)

    @property
    def sinks(self) -> frozenset[Incarnation]:
        """Whom it may push to."""
        return frozenset(self._sinks)

    def lose(self, other: CoreWorker, error: MeshError) -> None:
        """The other end of every pair with it is gone, and nothing is under way any more."""
        self._sinks.pop(other.incarnation, None)
        for link in [link for link, it in self._others.items() if it is other]:
            del self._others[link]
            self.do(self.senders.link_lost(link, error, self.clock.now))
            self.do(self.receivers.link_lost(link, error, self.clock.now))
            for key in [key for key in self._receives if key[0] == link]:
                self._settle_receive(self._receives.pop(key), TransferFailed("endpoint closed"))

    # --- orders -----------------------------------------------------------------------------------

    def take(self, order: CoreOrder) -> None:
        """Begin an order."""
        now, key = self.clock.now, order.key
        life = Life(order.task, has_push=order.task is Task.PROMPT and order.peer is not None)
        job = self.jobs[key, order.task] = SimJob(order, life)
        if order.task is Task.ANSWER:
            assert order.peer is not None
            job.lease, effects = self.leases.reserve(
                key, order.item, order.peer, now=now, wait_s=order.wait_s
            )
            self._do_leases(effects)
            if job.lease.state is LeaseState.WAITING:
                self.clock.at(job.lease.give_up_at, self._tick_leases)
            return
        job.sequence = Sequence(order.item)
        self._jobs_of[job.sequence] = job
        if order.task is Task.WHOLE:
            self.scheduler.add(job.sequence)
        else:
            self.scheduler.add_prefill(job.sequence)
            if order.peer is not None:
                link = self._sinks[order.peer]
                self.do(self.senders.begin(key, link, len(order.item.token_ids), now))
        self._step()

    def cancel(self, key: TransferKey, task: Task) -> None:
        """The gateway wants no more."""
        job = self.jobs.get((key, task))
        if job is not None:
            self._handle(job, LifeEvent.CANCELLED)

    def _handle(self, job: SimJob, event: LifeEvent, error: MeshError | None = None) -> None:
        key = job.order.key
        for effect in job.life.handle(event, error):
            match effect:
                case ReportFailed(why):
                    self._say(job, "failed", error=why)
                case ReportDone():
                    self._say(job, "done")
                case StopCompute():
                    assert job.sequence is not None
                    self.scheduler.abort(job.sequence)
                case AbortPush(why):
                    self.do(self.senders.give_up(key, why, self.clock.now))
                case CancelLease(why):
                    assert job.lease is not None
                    self._do_leases(self.leases.cancel(job.lease, why, now=self.clock.now))
                    if job.lease.state is LeaseState.RELEASED:
                        self._handle(job, LifeEvent.SETTLED)
                case Close():
                    self._close(job)

    def _close(self, job: SimJob) -> None:
        del self.jobs[job.order.key, job.order.task]
        if job.sequence is not None:
            del self._jobs_of[job.sequence]
            if job.order.task is Task.PROMPT:
                self.scheduler.release(job.sequence)
        self._do_leases(self.leases.grant_waiting(now=self.clock.now))
        self._step()

    def _say(
        self, job: SimJob, what: str, token: NewToken | None = None, error: MeshError | None = None
    ) -> None:
        self._tell(self, Word(job.order.stream_id, job.order.task, what, token, error))

    # --- leases -----------------------------------------------------------------------------------

    def _do_leases(self, effects: list[LeaseEffect]) -> None:
        for effect in effects:
            job = self.jobs.get((effect.lease.key, Task.ANSWER))
            match effect:
                case GrantLease(lease):
                    assert job is not None
                    self._say(job, "granted")
                    self.clock.at(lease.expires_at, self._tick_leases)
                    self.do(self.receivers.lease_changed(lease.key, self.clock.now))
                case Refuse(error=error):
                    assert job is not None
                    self._handle(job, LifeEvent.FAILED, error)
                case RefuseOpen(lease, error) | AbortReceive(lease, error):
                    self.do(self.receivers.give_up(lease.key, error, self.clock.now))

    def _tick_leases(self) -> None:
        self._do_leases(self.leases.tick(now=self.clock.now))

    # --- steps ------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Plan a step if none runs; it is computed at its end."""
        if self._is_stepping or not self.is_alive:
            return
        plan = self.scheduler.plan()
        for sequence in plan.admitted:
            job = self._jobs_of[sequence]
            if job.life.state is LifeState.QUEUED:
                self._handle(job, LifeEvent.ADMITTED)
        for failure in plan.failed:
            self._handle(self._jobs_of[failure.sequence], LifeEvent.FAILED, failure.error)
        if plan.is_empty:
            return
        self._is_stepping = True
        pushes = self._announce(plan)
        seconds = self.engine.step_seconds(plan.rows)
        self.work.note(seconds, len(plan.rows), self.pool.num_held)
        if pushes and self.engine.spreads_layers:
            for layer in range(1, self._num_layers):
                at_s = seconds * layer / self._num_layers
                self.clock.after(at_s, lambda num=layer: self._layers_ready(pushes, num))
        self.clock.after(seconds, lambda: self._finish(plan, pushes))

    def _layers_ready(self, pushes: list[TransferKey], num_layers: int) -> None:
        if self.is_alive:
            for key in pushes:
                self.do(self.senders.layers_ready(key, num_layers, self.clock.now))

    def _announce(self, plan: StepPlan) -> list[TransferKey]:
        pushes: list[TransferKey] = []
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            job = self._jobs_of[sequence]
            if job.order.task is not Task.PROMPT or job.order.peer is None:
                continue
            key = job.order.key
            pushes.append(key)
            if sequence in plan.admitted and row.start:
                self._plan_span(key, 0, row.start, is_cached=True)
            self._plan_span(key, row.start, row.stop, is_cached=False)
        return pushes

    def _plan_span(self, key: TransferKey, start: int, stop: int, *, is_cached: bool) -> None:
        mode = PushMode.LAYERWISE
        now = self.clock.now
        self.do(self.senders.span_planned(key, start, stop, mode, now, is_cached=is_cached))

    def _finish(self, plan: StepPlan, pushes: list[TransferKey]) -> None:
        if not self.is_alive:
            return
        self._is_stepping = False

        results = self.engine.step(plan.rows, lambda layer: self._layers_ready(pushes, layer + 1))
        if self.engine.spreads_layers:
            self._layers_ready(pushes, self._num_layers)
        outcome = self.scheduler.commit(plan, results)
        for key in pushes:
            self.do(self.senders.span_computed(key, self.clock.now))
        for token in outcome.tokens:
            self._sampled(self._jobs_of[token.sequence], token)
        self._do_leases(self.leases.grant_waiting(now=self.clock.now))
        self._step()

    def _sampled(self, job: SimJob, token: NewToken) -> None:
        is_first = job.life.state is LifeState.COMPUTING
        self._say(job, "first" if is_first else "token", token)
        if token.finish_reason is not FinishReason.NONE:
            self._handle(job, LifeEvent.ENDED)
        elif is_first and job.order.task is Task.WHOLE:
            self._handle(job, LifeEvent.BEGUN)
        elif is_first and job.order.peer is None:
            self._handle(job, LifeEvent.ENDED)
        elif is_first:
            self._handle(job, LifeEvent.SAMPLED)
            self.do(self.senders.commit(job.order.key, token.token_id, self.clock.now))

    # --- transfers --------------------------------------------------------------------------------

    def do(self, effects: list[SenderEffect] | list[ReceiverEffect]) -> None:
        """Perform effects in order, those that follow from them after them."""
        self._todo += effects
        if self._is_performing:
            return
        self._is_performing = True
        while self._todo:
            self._do(self._todo.popleft())
        self._is_performing = False

    def _do(self, effect: SenderEffect | ReceiverEffect) -> None:
        now = self.clock.now
        match effect:
            case transfer.SendMessage(link, message) | transfer.SendReply(link, message):
                self.clock.after(WIRE_S, lambda: self._deliver(link, message))
            case transfer.GatherAndSend():
                self._send(effect)
            case transfer.EndTransfer(key, error):
                job = self.jobs[key, Task.PROMPT]
                self._handle(job, LifeEvent.FAILED if error else LifeEvent.PUSHED, error)
                self._handle(job, LifeEvent.SETTLED)
            case transfer.AskTerms(key, source):
                self._attach(key, source)
            case transfer.PostReceive(link=link, tag=tag):
                self._receives[link, tag] = effect
            case transfer.CancelReceive(key, frame_idx):
                for place, order in list(self._receives.items()):
                    if (order.key, order.frame.idx) == (key, frame_idx):
                        self._settle_receive(self._receives.pop(place), TransferFailed("cancelled"))
            case transfer.VerifyAndPlace():
                self._place(effect)
            case transfer.HandOver(key, first_token):
                self._join(self.jobs[key, Task.ANSWER], first_token)
            case transfer.ReportFailure(key, error):
                job = self.jobs[key, Task.ANSWER]
                assert job.lease is not None
                self.leases.cancel(job.lease, error, now=now)
                self._handle(job, LifeEvent.FAILED, error)
            case transfer.QuarantineLease(key):
                job = self.jobs[key, Task.ANSWER]
                assert job.lease is not None
                self.leases.begin_quarantine(job.lease)
            case transfer.ReleaseLease(key):
                self._release(self.jobs[key, Task.ANSWER])
            case transfer.EndLeases(source, error):
                self._do_leases(self.leases.lose_source(source, error, now=now))
            case transfer.CloseLink(reason=reason):
                raise InvariantViolated(f"a pair was given up: {reason}")

    def _deliver(self, link: LinkId, message: SourceMessage | SinkMessage) -> None:
        other = self._others.get(link)
        if other is None or not other.is_alive or not self.is_alive:
            return
        now = self.clock.now
        if link in self._sinks.values():
            other.do(other.receivers.message(link, message, now))  # type: ignore[arg-type]
        else:
            other.do(other.senders.message(link, message, now))  # type: ignore[arg-type]

    def _send(self, order: transfer.GatherAndSend) -> None:
        """Read the blocks now, and let the frame land later; a frame to nobody fails."""
        job, frame = self.jobs[order.key, Task.PROMPT], order.frame
        assert job.sequence is not None
        layers = (frame.first_layer, frame.last_layer)
        payload = self.engine.read(job.sequence.block_table, frame.start, frame.stop, layers)
        self.num_frames_sent += 1

        def land() -> None:
            other = self._others.get(order.link)
            error = None
            if other is None or not other.is_alive:
                error = TransferFailed("endpoint closed")
            elif (receive := other._receives.pop((order.link, order.tag), None)) is not None:
                other._landed[receive.slot] = StagedFrame(order, payload)
                other._settle_receive(receive, None)
            if self.is_alive:
                self.do(self.senders.send_settled(order.key, frame.idx, error, self.clock.now))

        begins_at = max(self.clock.now, self._link_free_at)
        self._link_free_at = begins_at + frame.payload_bytes * self._byte_s
        self.clock.at(self._link_free_at + WIRE_S, land)

    def _settle_receive(self, order: transfer.PostReceive, error: MeshError | None) -> None:
        self.do(self.receivers.receive_settled(order.key, order.frame.idx, error, self.clock.now))

    def _attach(self, key: TransferKey, source: Incarnation) -> None:
        now = self.clock.now
        if not self.receivers.is_waiting(key):
            return
        job = self.jobs.get((key, Task.ANSWER))
        if job is None or job.lease is None:
            self.receivers.must_wait(key, now, is_reserved=False)
        elif not self.leases.open(job.lease, source):
            self.receivers.must_wait(key, now, is_reserved=True)
        else:
            lease = job.lease
            self.do(self.receivers.attached(key, lease.num_tokens, lease.skip_tokens, now))

    def _place(self, order: transfer.VerifyAndPlace) -> None:
        job, frame = self.jobs[order.key, Task.ANSWER], order.frame
        assert job.lease is not None
        staged = self._landed.pop(order.slot)
        sent = staged.order
        error = None
        if (sent.transfer_id, sent.epoch, sent.frame) != (order.transfer_id, order.epoch, frame):
            error = TransferFailed("another frame stands in the slot")
        else:
            layers = (frame.first_layer, frame.last_layer)
            table = job.lease.block_table
            self.engine.write(table, frame.start, frame.stop, layers, staged.payload)
        self.do(self.receivers.frame_placed(order.key, frame.idx, error, self.clock.now))

    def _join(self, job: SimJob, first_token: int) -> None:
        assert job.lease is not None
        if job.lease.state is not LeaseState.OPEN:
            self._release(job)  # cancelled in the same instant
            return
        job.sequence = self.leases.join(job.lease, first_token)
        self._jobs_of[job.sequence] = job
        self._handle(job, LifeEvent.BEGUN)
        self.scheduler.add_ready(job.sequence)
        self._say(job, "joined")
        self._step()

    def _release(self, job: SimJob) -> None:
        lease = job.lease
        assert lease is not None
        is_quarantined = lease.state is LeaseState.QUARANTINED
        end = self.leases.end_quarantine if is_quarantined else self.leases.release
        effects = end(lease, now=self.clock.now)
        is_clean = job.life.state is LifeState.RECEIVING
        self._handle(job, LifeEvent.CANCELLED if is_clean else LifeEvent.SETTLED)
        self._do_leases(effects)

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing: no order, no block, no slot."""
        return not self.jobs and not self._is_stepping and self.pool.num_held == 0

    def check(self) -> None:
        """Check every ledger."""
        self.scheduler.check_integrity()
        self.leases.check_integrity()
        self.senders.check_integrity()
        self.receivers.check_integrity()
        self.pool.check_integrity([*self.scheduler.tables(), *self.leases.tables()])
