"""A mesh of cores alone: the gateway's (admission, table, routing, dispatcher, life) and the
workers' of ``worker.py``, on one event heap.

    mesh = CoreMesh(spec, layout, lambda size: TimedEngine(cost), WorkerSize(num_blocks=4096))
    prefill, decode = mesh.start("prefill"), mesh.start("decode")
    mesh.settle()
    answer = mesh.ask((1, 2, 3), max_tokens=8)
    mesh.run(lambda: answer.is_over)

Every call below belongs to a core, or carries out one of its effects.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.core import admission
from services.gateway.core.admission import Admission, Admit, TurnAway
from services.gateway.core.dispatcher import BlamePair, Dispatcher, Effect, LookForPair, Send
from services.gateway.core.lifecycle import CancelLeg, End, Leg, Lifecycle, Reroute
from services.gateway.core.overload import Overload, OverloadMode
from services.gateway.core.peer_table import PeerTable
from services.gateway.core.pools import (
    HomeOrder,
    Pool,
    change_home,
    home_of,
    is_confirmed,
    pool_of,
)
from services.gateway.core.routing import POLICIES, RouteDecision, route
from services.gateway.core.speeds import ReportedSpeeds
from services.gateway.core.tenants import Terms
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.sim.clock import WIRE_S, CountedBytes, EventClock
from services.sim.engine import SimEngine
from services.sim.worker import CoreOrder, CoreWorker, Word, WorkerSize
from shared.errors import MeshError, WorkerLost
from shared.home import Home
from shared.ids import Incarnation, LeaseToken, RequestId, StreamId
from shared.kv.layout import KvLayout
from shared.liveness import Liveness, LivenessRule, PeerState
from shared.model_spec import ModelSpec
from shared.request import AnswerToken, SamplingParams, WorkItem
from shared.transfer.messages import LinkId, TransferKey
from shared.worker.core.life import Task

ANY = Terms()
TASKS = {Leg.PREFILL: Task.PROMPT, Leg.DECODE: Task.ANSWER, Leg.WHOLE: Task.WHOLE}
LEGS = {task: leg for leg, task in TASKS.items()}


class SentLeg(NamedTuple):
    """One leg of the attempt that runs."""

    worker: Incarnation
    stream_id: StreamId
    key: TransferKey


@dataclass(eq=False)
class CoreAnswer:
    """One request at the gateway: its two cores, and what its client has."""

    key: RequestId
    prompt: tuple[int, ...]
    life: Lifecycle
    dispatcher: Dispatcher
    tokens: list[AnswerToken] = field(default_factory=list[AnswerToken])
    decisions: list[RouteDecision] = field(default_factory=list[RouteDecision])
    legs: dict[Leg, SentLeg] = field(default_factory=dict[Leg, SentLeg])
    search: LookForPair | None = None
    is_over: bool = False
    error: MeshError | None = None
    asked_at: float = 0.0
    token_times: list[float] = field(default_factory=list[float])

    @property
    def token_ids(self) -> list[int]:
        """The answer so far."""
        return [token.token_id for token in self.tokens]


@dataclass
class Member:
    """A worker with what the gateway knows of it. home: its own word, told with each report."""

    core: CoreWorker
    worker: Worker
    watch: Liveness
    home: Home
    has_heard: dict[Role, StreamId] = field(default_factory=dict[Role, StreamId])


class CoreMesh:
    """One gateway and its workers."""

    liveness = LivenessRule()

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        new_engine: Callable[[WorkerSize], SimEngine],
        size: WorkerSize,
        *,
        policy: str = "least_loaded",
        max_running: int = 16,
        max_waiting: int = 64,
        max_wait_s: float = 10.0,
    ) -> None:
        """size: of every worker. max_running, max_waiting, max_wait_s: of the gateway."""
        self.clock = EventClock()
        self.table = PeerTable()
        self.members: dict[Incarnation, Member] = {}
        self.policy = POLICIES[policy]()
        self.overload = Overload(OverloadMode.OFF, ReportedSpeeds())
        self._admission = Admission(
            max_running=max_running,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            overload=self.overload,
            sides=lambda: self.table.sides,
        )
        self._max_wait_s = max_wait_s
        self._orders: list[HomeOrder] = []
        self._spec, self._layout = spec, layout
        self._new_engine, self._size = new_engine, size
        self._random_bytes = CountedBytes(99)
        self._links = itertools.count(1)
        self._order_numbers = itertools.count(1)
        self._stream_ids = itertools.count(1)
        self.on_end: Callable[[CoreAnswer], None] = lambda answer: None
        self._answers: dict[RequestId, CoreAnswer] = {}
        self._by_stream: dict[StreamId, tuple[CoreAnswer, int, Leg]] = {}

    def run(self, until: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let events happen until this holds."""
        self.clock.run(until, limit_s)

    # --- workers ----------------------------------------------------------------------------------

    def start(
        self,
        role: str,
        *,
        serves_both: bool = False,
        engine: SimEngine | None = None,
        size: WorkerSize | None = None,
    ) -> CoreWorker:
        """A new worker joins, and is paired with all that it may push to or take from. engine,
        size: None = as every worker's."""
        size = size or self._size
        core = CoreWorker(
            1 + len(self.members),
            self.clock,
            self._spec,
            self._layout,
            engine or self._new_engine(size),
            self._tell,
            size=size,
        )
        worker = Worker(
            role=Role(role),
            incarnation=core.incarnation,
            host="core",
            port=1,
            model=self._spec,
            layout=self._layout,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            serves=(Role.PREFILL, Role.DECODE) if serves_both else (),
        )
        member = Member(core, worker, Liveness(self.clock.now, self.liveness), home_of(worker))
        for other in [it for it in self.members.values() if it.core.is_alive]:
            for source, sink in ((member, other), (other, member)):
                if Role.PREFILL in source.worker.serves and Role.DECODE in sink.worker.serves:
                    source.core.pair(sink.core, LinkId(next(self._links)))
        self.members[core.incarnation] = member
        self.table.join(worker)
        worker.sessions.update(worker.serves)
        self._beat(member)
        self._watch(member)
        return core

    def settle(self) -> None:
        """Let every worker report its pairs."""
        members = self.members.values()
        self.run(lambda: all(it.worker.status.paired >= it.core.sinks for it in members))

    def kill(self, core: CoreWorker) -> None:
        """The process is gone without a word."""
        core.is_alive = False

    def worker(self, core: CoreWorker) -> Worker:
        """The gateway's view of it."""
        return self.members[core.incarnation].worker

    def pool(self, core: CoreWorker) -> Pool:
        """The pool that it is in."""
        return pool_of(self.worker(core))

    def move(self, core: CoreWorker, home: str) -> Home:
        """Order it to another home; it says so with its next report."""
        self._orders += change_home(self.table, core.incarnation, home, next(self._order_numbers))
        wanted = self._orders[-1].home
        self._give_home(self._orders[0])
        return wanted

    def _give_home(self, order: HomeOrder) -> None:
        member = self.members[order.worker]

        def hear() -> None:
            member.home = member.home.after(order.home, member.worker.serves)
            self._report(member)

        self.clock.after(WIRE_S, hear)

    def _look_at_homes(self, worker: Worker) -> None:
        if not self._orders or self._orders[0].worker != worker.incarnation:
            return
        if is_confirmed(worker, self._orders[0].home):
            self._orders.pop(0)
            if self._orders:
                self._give_home(self._orders[0])

    def has_moved(self, core: CoreWorker, wanted: Home) -> bool:
        """Whether the gateway has heard that it did."""
        return home_of(self.worker(core)) == wanted

    def _beat(self, member: Member) -> None:
        if not member.core.is_alive:
            return
        self._report(member)
        self.clock.after(member.watch.rule.interval_s, lambda: self._beat(member))

    def _report(self, member: Member) -> None:
        """A worker tells its load; it is read when it arrives."""
        core = member.core
        scheduled, leased = core.scheduler.statistics(), core.leases.statistics()
        tasks = [job.order.task for job in core.jobs.values()]
        own = {core.incarnation} if len(member.worker.serves) > 1 else set[Incarnation]()
        load = WorkerStatus(
            pending_tokens=scheduled.pending_tokens,
            num_waiting=scheduled.num_waiting + leased.num_waiting,
            num_running=scheduled.num_running + scheduled.num_held,
            free_blocks=core.pool.num_available,
            reserved_blocks=core.pool.num_held,
            paired=core.sinks | own,
            num_prompts=tasks.count(Task.PROMPT),
            num_answers=tasks.count(Task.ANSWER),
            home=member.home.role,
            home_epoch=member.home.epoch,
            home_order=member.home.order,
            seen=dict(member.has_heard),
        )
        status, read_at = self.report_of(member, load), self.clock.now + WIRE_S

        def read() -> None:
            member.watch.heard(self.clock.now)
            is_here = self.table.get(core.incarnation) is not None
            if is_here and self.table.report(member.worker, status, read_at):
                self._look_again()
            self._look_at_homes(member.worker)

        self.clock.after(WIRE_S, read)

    def report_of(self, member: Member, load: WorkerStatus) -> WorkerStatus:
        """What a worker tells beside its load."""
        return load

    def _watch(self, member: Member) -> None:
        """What silence says of a worker, at the gateway and at the other ends of its pairs."""
        now, worker, role = self.clock.now, member.worker, member.worker.role
        state = member.watch.state(now)
        if state is PeerState.DEAD:
            self._lose(member)
            return
        was_silent = bool(worker.silent)
        (worker.silent.add if state is PeerState.SUSPECT else worker.silent.discard)(role)
        if bool(worker.silent) is not was_silent:
            self.table.note_usability()
            self._look_again()
        self.clock.at(member.watch.next_check_at(now), lambda: self._watch(member))

    def _lose(self, member: Member) -> None:
        self.table.leave(member.core.incarnation)
        error = WorkerLost("it has been silent for too long")
        for role in member.worker.serves:
            member.worker.lost(role)
        for answer in list(self._answers.values()):
            lost = [leg for leg, it in answer.legs.items() if it.worker == member.core.incarnation]
            for leg in lost:
                attempt = answer.life.num_attempts - 1
                self._apply(answer, answer.life.leg_failed(attempt, leg, error, lost=True))
        for other in self.members.values():
            if other is not member and other.core.is_alive:
                other.core.lose(member.core, error)
                self._report(other)

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, prompt: tuple[int, ...], terms: Terms = ANY, **sampling: object) -> CoreAnswer:
        """A client asks; it is let in at once, or when its turn comes."""
        key = RequestId(self._random_bytes(16))
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        life = Lifecycle(prompt, params, max_attempts=4)
        dispatcher = Dispatcher(life, deadline_at=None, pair_wait_s=10.0, failover_wait_s=5.0)
        now = self.clock.now
        answer = CoreAnswer(key, prompt, life, dispatcher, asked_at=now)
        self._answers[key] = answer
        self._perform(self._admission.arrive(key, now, terms=terms, num_tokens=len(prompt)))
        if not (answer.is_over or answer.decisions or answer.search):
            self.clock.at(now + self._max_wait_s, self._tick_admission)
        return answer

    def _tick_admission(self) -> None:
        self._perform(self._admission.tick(self.clock.now))

    def _perform(self, effects: Iterable[admission.Effect]) -> None:
        """What admission decided of the requests that wait."""
        for effect in effects:
            answer = self._answers[RequestId(effect.key)]
            match effect:
                case Admit():
                    self._apply(answer, answer.dispatcher.begin(self.clock.now))
                case TurnAway(_, error):
                    self._apply(answer, answer.dispatcher.give_up(error))

    def _apply(self, answer: CoreAnswer, effects: Iterable[Effect]) -> None:
        """Carry out what a core decided, and what follows from it, in order."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case AnswerToken():
                    answer.tokens.append(effect)
                    answer.token_times.append(self.clock.now)
                case CancelLeg(leg):
                    self._cancel(answer, leg)
                case Reroute():
                    watches = [self.members[it.worker].watch for it in answer.legs.values()]
                    now = self.clock.now
                    silence_s = max(watch.silence_s(now) for watch in watches)
                    todo += answer.dispatcher.attempt_failed(effect, silence_s=silence_s, now=now)
                case LookForPair():
                    self._search(answer, effect)
                case BlamePair(prefill, decode):
                    self.table.pair_failed(prefill, decode)
                case Send():
                    self._send(answer, effect)
                case End(error):
                    self._end(answer, error)

    def _search(self, answer: CoreAnswer, search: LookForPair) -> None:
        answer.search = search
        self.clock.at(search.until, lambda: self._wait_over(answer, search))
        self._look(answer)

    def _look(self, answer: CoreAnswer) -> None:
        if answer.search is None:
            return
        decision = route(self.policy, answer.search.request, self.table.sides, 0.5)
        if decision is not None:
            answer.search = None
            self._apply(answer, answer.dispatcher.pair_found(decision, self.clock.now))

    def _look_again(self) -> None:
        for answer in list(self._answers.values()):
            self._look(answer)

    def _wait_over(self, answer: CoreAnswer, search: LookForPair) -> None:
        if answer.search is search:
            self._apply(answer, answer.dispatcher.wait_over(self.table.why_not_ready()))

    def _send(self, answer: CoreAnswer, send: Send) -> None:
        answer.decisions.append(send.decision)
        answer.legs = {}
        key = TransferKey(answer.key, send.attempt, LeaseToken(self._random_bytes(16)))
        item = WorkItem(
            token_ids=send.token_ids,
            num_prompt_tokens=answer.life.num_prompt_tokens,
            sampling=send.sampling,
        )
        for leg, incarnation in send.legs.items():
            member = self.members[incarnation]
            stream_id = StreamId(next(self._stream_ids))
            peer = send.legs.get(Leg.DECODE if leg is Leg.PREFILL else Leg.PREFILL)
            order = CoreOrder(stream_id, TASKS[leg], key, item, peer, send.wait_s)
            answer.legs[leg] = SentLeg(incarnation, stream_id, key)
            self._by_stream[stream_id] = (answer, send.attempt, leg)
            num_tokens = len(send.token_ids)
            member.worker.sent(
                _side(leg),
                stream_id,
                num_tokens=0 if leg is Leg.DECODE else num_tokens,
                num_blocks=member.worker.blocks_for(num_tokens + (leg is not Leg.PREFILL)),
                now=self.clock.now,
            )

            def arrive(member: Member = member, order: CoreOrder = order, leg: Leg = leg) -> None:
                if member.core.is_alive:
                    member.has_heard[_side(leg)] = order.stream_id
                    member.core.take(order)

            self.clock.after(WIRE_S, arrive)

    def _cancel(self, answer: CoreAnswer, leg: Leg) -> None:
        sent = answer.legs[leg]
        core = self.members[sent.worker].core
        self._close(sent.stream_id)

        def arrive() -> None:
            if core.is_alive:
                core.cancel(sent.key, TASKS[leg])

        self.clock.after(WIRE_S, arrive)

    def _end(self, answer: CoreAnswer, error: MeshError | None) -> None:
        answer.is_over, answer.error, answer.search = True, error, None
        del self._answers[answer.key]
        self.on_end(answer)
        self._perform(self._admission.leave(answer.key, self.clock.now))

    # --- what workers say -------------------------------------------------------------------------

    def _tell(self, core: CoreWorker, word: Word) -> None:
        if core.is_alive:
            self.clock.after(WIRE_S, lambda: self._hear(core, word))

    def _hear(self, core: CoreWorker, word: Word) -> None:
        found = self._by_stream.get(word.stream_id)
        if found is None:
            return
        answer, attempt, leg = found
        life, worker = answer.life, self.members[core.incarnation].worker
        match word.what:
            case "granted":
                self._apply(answer, life.granted(attempt))
            case "joined":
                life.joined(attempt)
            case "done":
                self._close(word.stream_id)
                life.prefill_done(attempt)
            case "failed":
                assert word.error is not None
                self._close(word.stream_id)
                self._apply(answer, life.leg_failed(attempt, leg, word.error, lost=False))
            case _:
                assert word.token is not None
                new = word.token
                if word.what == "first":
                    worker.computed(_side(leg), word.stream_id)
                if new.finish_reason and leg is not Leg.PREFILL:
                    self._close(word.stream_id)
                token = AnswerToken(new.index, new.token_id, new.finish_reason)
                self._apply(answer, life.token_arrived(attempt, leg, token))

    def _close(self, stream_id: StreamId) -> None:
        found = self._by_stream.pop(stream_id, None)
        if found is not None:
            answer, _, leg = found
            worker = self.members[answer.legs[leg].worker].worker
            worker.ended(_side(leg), stream_id)

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held anywhere, neither at the gateway nor at a worker that lives."""
        alive = [member for member in self.members.values() if member.core.is_alive]
        has_orders = any(any(it.worker.orders.values()) for it in alive)
        return not self._answers and not has_orders and all(it.core.is_idle for it in alive)

    def check(self) -> None:
        """Check every ledger of every worker that lives."""
        for member in self.members.values():
            if member.core.is_alive:
                member.core.check()


def _side(leg: Leg) -> Role:
    return Role.PREFILL if leg is Leg.PREFILL else Role.DECODE
