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
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from services.gateway.core.admission import admission
from services.gateway.core.admission.admission import Admission, Admit, TurnAway
from services.gateway.core.admission.overload import Overload, OverloadMode
from services.gateway.core.admission.tenants import Terms
from services.gateway.core.dispatcher import (
    BlamePair,
    Dispatcher,
    Effect,
    LookForPair,
    Send,
    WorkerDrains,
)
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.lifecycle import CancelLeg, End, Leg, Lifecycle, Reroute
from services.gateway.core.routing.expectations import EndedAnswer
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.core.worker import Role, Worker
from services.sim.clock import WIRE_S, counted_bytes, counted_chances
from services.sim.engine import TimedEngine
from services.sim.members import Member, Members
from services.sim.orders import Word, WorkerSize
from services.sim.token_times import TokenTimes
from services.sim.worker import CoreWorker
from shared.errors import MeshError
from shared.ids import Incarnation, LeaseToken, RequestId, StreamId
from shared.kv.layout import KvLayout
from shared.kv.prefix_hash import column_of
from shared.model_spec import ModelSpec
from shared.request import AnswerToken, FinishReason, SamplingParams, WorkItem
from shared.schedule.plan import PromptTimes
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order
from shared.worker.core.life import Task

ANY = Terms()

TASKS = {Leg.PREFILL: Task.PROMPT, Leg.DECODE: Task.ANSWER, Leg.WHOLE: Task.WHOLE}


class SentLeg(NamedTuple):
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
    token_ids: list[int] = field(default_factory=list[int])
    decisions: list[RouteDecision] = field(default_factory=list[RouteDecision])
    legs: dict[Leg, SentLeg] = field(default_factory=dict[Leg, SentLeg])
    search: LookForPair | None = None
    is_over: bool = False
    error: MeshError | None = None
    asked_at: float = 0.0
    token_times: TokenTimes = field(default_factory=TokenTimes)
    sent_at: float = 0.0
    computed: PromptTimes | None = None
    hashed: HashedPrompt | None = None


class CoreMesh(Members):
    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        new_engine: Callable[[WorkerSize], TimedEngine],
        size: WorkerSize,
        *,
        policy: str = "least_loaded",
        max_running: int = 16,
        max_waiting: int = 64,
        max_wait_s: float = 10.0,
        max_pending_tokens: int = 0,
        wire_s: float = WIRE_S,
        skips: bool = False,
    ) -> None:
        """size: of every worker. max_running, max_waiting, max_wait_s, max_pending_tokens: of the
        gateway. wire_s: how long a message is under way. skips: see ``CoreWorker``."""
        super().__init__(spec, layout, new_engine, size, policy=policy, wire_s=wire_s, skips=skips)
        self._chances = counted_chances(7)
        self.overload = Overload(OverloadMode.OFF)
        self._admission = Admission(
            max_running=max_running,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            overload=self.overload,
            sides=lambda: self.router.sides,
            why_not_ready=self.table.why_not_ready,
            max_pending_tokens=max_pending_tokens,
        )
        self._may_be_refused = not max_pending_tokens
        self._max_wait_s, self._tick_at = max_wait_s, math.inf
        self._random_bytes = counted_bytes(99)
        self._stream_ids = itertools.count(1)
        self.on_end: Callable[[CoreAnswer], None] = lambda answer: None
        self._answers: dict[RequestId, CoreAnswer] = {}
        self._by_stream: dict[StreamId, tuple[CoreAnswer, int, Leg]] = {}

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, prompt: tuple[int, ...], terms: Terms = ANY, **sampling: object) -> CoreAnswer:
        """A client asks; it is let in at once, or when its turn comes."""
        answer = self.new_answer(prompt, **sampling)
        self.admit(answer, terms)
        return answer

    def new_answer(self, prompt: tuple[int, ...], **sampling: object) -> CoreAnswer:
        """What is to become of a request that comes now."""
        key = RequestId(self._random_bytes(16))
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        life = Lifecycle(prompt, params, max_attempts=4)
        hashed = HashedPrompt(column_of(prompt), b"") if self.router.needs_prompt else None
        dispatcher = Dispatcher(
            life,
            deadline_at=None,
            pair_wait_s=self._max_wait_s,
            failover_wait_s=5.0,
            may_be_refused=self._may_be_refused,
            prompt=hashed,
        )
        answer = CoreAnswer(key, prompt, life, dispatcher, asked_at=self.clock.now, hashed=hashed)
        self._answers[key] = answer
        return answer

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the gateway."""
        return self._admission.statistics().num_waiting

    def admit(self, answer: CoreAnswer, terms: Terms = ANY) -> None:
        """Let it in, now or when its turn comes."""
        key, num_tokens, now = answer.key, len(answer.prompt), self.clock.now
        self._perform(
            self._admission.arrive(
                key,
                now,
                terms=terms,
                num_tokens=num_tokens,
                cached=lambda now: self.router.cached(answer.hashed, now),
            ),
            coming=key,
        )
        self._set_timer()

    def _set_timer(self) -> None:
        due_at = self._admission.next_tick_at
        if due_at is not None and due_at < self._tick_at:
            self._tick_at = due_at
            self.clock.at(due_at, self._tick_admission)

    def _tick_admission(self) -> None:
        self._tick_at = math.inf
        self._perform(self._admission.tick(self.clock.now))
        self._set_timer()

    def _perform(self, effects: Iterable[admission.Effect], coming: bytes = b"") -> None:
        """What admission decided of the requests that wait, and of the one that comes now."""
        for effect in effects:
            answer = self._answers[RequestId(effect.key)]
            match effect:
                case Admit(key) if key == coming:
                    self._begin(answer)
                case Admit():
                    # Who waited wakes behind this instant: what comes with this is counted first.
                    self.clock.after(0.0, partial(self._begin, answer))
                case TurnAway(_, error):
                    self._apply(answer, answer.dispatcher.give_up(error))

    def _begin(self, answer: CoreAnswer) -> None:
        self._apply(answer, answer.dispatcher.begin(self.clock.now))

    def _apply(self, answer: CoreAnswer, effects: Iterable[Effect]) -> None:
        """Carry out what a core decided, and what follows from it, in order."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case AnswerToken():
                    answer.token_ids.append(effect.token_id)
                    answer.token_times.append(self.clock.now)
                    self._emitted(answer, 1)
                case CancelLeg(leg):
                    self._cancel(answer, leg)
                case Reroute():
                    members = [self.members[it.worker] for it in answer.legs.values()]
                    now = self.clock.now
                    silence_s = max(now - member.heard_at(now) for member in members)
                    todo += answer.dispatcher.attempt_failed(effect, silence_s=silence_s, now=now)
                case LookForPair():
                    self._search(answer, effect)
                case BlamePair(prefill, decode):
                    self.table.pair_failed(prefill, decode)
                case WorkerDrains(worker):
                    self.table.drains(worker)
                case Send():
                    self._send(answer, effect)
                case End(error):
                    self._end(answer, error)

    def _emitted(self, answer: CoreAnswer, num_tokens: int) -> None:
        cached = 0 if answer.computed is None else answer.computed.cached_tokens
        now = self.clock.now
        self._perform(self._admission.emitted(answer.key, num_tokens, now, cached_tokens=cached))

    def _is_refused_now(self, answer: CoreAnswer) -> bool:
        """Ask admission once more, now that the prompt is computed; whether that was the end."""
        refusals = self._admission.prompt_computed(answer.key, self.clock.now)
        self._perform(refusals)
        return bool(refusals)

    def _search(self, answer: CoreAnswer, search: LookForPair) -> None:
        answer.search = search
        self._look(answer)
        if answer.search is search:  # nearly all find one at once
            self.clock.at(search.until, lambda: self._wait_over(answer, search))

    def _look(self, answer: CoreAnswer) -> None:
        if answer.search is None:
            return
        now = self.clock.now
        decision, wanted = self.router.route(answer.search.request, now, next(self._chances))
        for pair in wanted:
            self._want(pair)
        if decision is None:
            return
        prompt, answer.search = answer.search.request.prompt, None
        pair = answer.dispatcher.pair(decision)
        effects = self._admission.pair_found(answer.key, pair, now)
        if not any(isinstance(it, TurnAway) for it in effects):
            self.router.sent(decision, prompt, now)
            self._apply(answer, answer.dispatcher.pair_found(decision, now))
        self._perform(effects)

    def _look_again(self) -> None:
        for answer in list(self._answers.values()):
            self._look(answer)
        self._perform(self._admission.changed(self.clock.now))

    def _reported(self, worker: Worker) -> None:
        self._perform(self._admission.changed(self.clock.now, worker))

    def _wait_over(self, answer: CoreAnswer, search: LookForPair) -> None:
        if answer.search is search:
            self._apply(answer, answer.dispatcher.wait_over(self.table.why_not_ready()))

    def _send(self, answer: CoreAnswer, send: Send) -> None:
        decision, now = send.decision, self.clock.now
        answer.decisions.append(decision)
        answer.legs, answer.sent_at = {}, now
        prefix = decision.fetch_order(len(send.token_ids))
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
            its_prefix = None if leg is Leg.DECODE else prefix
            order = Order(stream_id, key, item, peer, wait_s=send.wait_s, prefix=its_prefix)
            answer.legs[leg] = SentLeg(incarnation, stream_id, key)
            self._by_stream[stream_id] = (answer, send.attempt, leg)
            member.worker.ordered(
                Role.PREFILL if leg is Leg.PREFILL else Role.DECODE,
                stream_id,
                len(send.token_ids),
                computes=leg is not Leg.DECODE,
                now=now,
                num_cached=decision.num_cached,
            )

            def arrive(member: Member = member, order: Order = order, leg: Leg = leg) -> None:
                if member.core.is_alive:
                    member.has_heard = order.stream_id
                    member.core.take(TASKS[leg], order)

            self.clock.send(arrive)

    def _cancel(self, answer: CoreAnswer, leg: Leg) -> None:
        sent = answer.legs[leg]
        core = self.members[sent.worker].core
        self._close(sent.stream_id)

        def arrive() -> None:
            if core.is_alive:
                core.cancel(sent.key, TASKS[leg])

        self.clock.send(arrive)

    def _end(self, answer: CoreAnswer, error: MeshError | None) -> None:
        answer.is_over, answer.error, answer.search = True, error, None
        del self._answers[answer.key]
        self._learn(answer)
        self.on_end(answer)
        # Its client goes when all of the same message is heard, the ends of other answers, too.
        self.clock.after(0.0, lambda: self._leave(answer.key))

    def _leave(self, key: RequestId) -> None:
        self._perform(self._admission.leave(key, self.clock.now))

    def _learn(self, answer: CoreAnswer) -> None:
        """Hold what was expected of it against what came of it."""
        if not answer.decisions:
            return
        decision, times = answer.decisions[-1], answer.token_times
        came, waited_s = (
            answer.computed or PromptTimes(0.0, 0.0, 0),
            answer.sent_at - answer.asked_at,
        )
        ttft_s = times[0] - answer.asked_at if times else None
        self.router.learn(
            EndedAnswer(
                prefill=decision.prefill,
                decode=decision.decode,
                is_whole=answer.error is None,
                num_attempts=answer.life.num_attempts,
                prompt_tokens=len(answer.prompt),
                output_tokens=answer.life.num_output_tokens,
                ttft_s=ttft_s,
                predicted_ttft_s=decision.prediction and waited_s + decision.prediction.ttft_s,
                handover_s=(ttft_s or 0.0) - waited_s - came.queue_s - came.compute_s,
                cached_tokens=came.cached_tokens,
                predicted_cached_tokens=decision.num_cached,
                fetched_from=decision.fetch and decision.fetch.source,
                fetched_bytes=came.fetched_bytes,
                fetch_s=came.fetch_s,
            ),
            self.clock.now,
        )

    def _lost(self, member: Member, error: MeshError) -> None:
        for answer in list(self._answers.values()):
            lost = [leg for leg, it in answer.legs.items() if it.worker == member.core.incarnation]
            for leg in lost:
                self._by_stream.pop(answer.legs[leg].stream_id, None)
                attempt = answer.life.num_attempts - 1
                self._apply(answer, answer.life.leg_failed(attempt, leg, error, lost=True))

    # --- what workers say -------------------------------------------------------------------------

    def _tell(self, core: CoreWorker, word: Word) -> None:
        if core.is_alive:
            self.clock.send(lambda: self._hear(core, word))

    def _hear(self, core: CoreWorker, word: Word) -> None:
        found = self._by_stream.get(word.stream_id)
        if found is None:
            return
        answer, attempt, leg = found
        life, worker = answer.life, self.members[core.incarnation].worker
        match word.what:
            case "granted":
                self._apply(answer, life.granted(attempt))
                self._perform(self._admission.granted(answer.key, self.clock.now))
            case "joined":
                life.joined(attempt)
            case "done":
                self._close(word.stream_id)
                life.prefill_done(attempt)
            case "failed":
                assert word.error is not None
                self._close(word.stream_id)
                self._apply(answer, life.leg_failed(attempt, leg, word.error, lost=False))
            case "run":
                self._hear_run(answer, attempt, leg, word)
            case _:
                assert word.token is not None
                new = word.token
                if word.what == "first":
                    worker.computed(word.stream_id)
                    answer.computed = answer.computed or word.prompt
                    if not new.finish_reason and self._is_refused_now(answer):
                        return
                # A prompt's order ends with ``done``: its worker may still push, and holds blocks.
                if new.finish_reason and leg is not Leg.PREFILL:
                    self._close(word.stream_id)
                token = AnswerToken(new.index, new.token_id, new.finish_reason)
                self._apply(answer, life.token_arrived(attempt, leg, token))

    def _hear_run(self, answer: CoreAnswer, attempt: int, leg: Leg, word: Word) -> None:
        """Tokens of equal steps, each at its own time; the last may end the answer."""
        new, steps = word.token, word.steps
        assert new is not None
        assert steps is not None
        if new.finish_reason:
            # ``many_arrived`` takes no token that ends an answer.
            steps = steps._replace(stop=steps.stop - 1)
        tokens = [new.token_id] * steps.num
        if answer.life.many_arrived(attempt, leg, new.index, tokens):
            answer.token_ids += tokens
            answer.token_times.extend(steps, self.clock.wire_s)
            self._emitted(answer, steps.num)
        else:
            for idx, token_id in enumerate(tokens, new.index):
                token = AnswerToken(idx, token_id, FinishReason.NONE)
                self._apply(answer, answer.life.token_arrived(attempt, leg, token))
        if new.finish_reason:
            self._close(word.stream_id)
            token = AnswerToken(new.index + steps.num, new.token_id, new.finish_reason)
            self._apply(answer, answer.life.token_arrived(attempt, leg, token))

    def _close(self, stream_id: StreamId) -> None:
        found = self._by_stream.pop(stream_id, None)
        if found is not None:
            answer, _, leg = found
            worker = self.members[answer.legs[leg].worker].worker
            worker.ended(stream_id)

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held anywhere, neither at the gateway nor at a worker that lives."""
        alive = [member for member in self.members.values() if member.core.is_alive]
        has_orders = any(it.worker.orders for it in alive)
        is_busy = self._answers or self._by_stream or has_orders
        return not is_busy and all(it.core.is_idle for it in alive)

    def check(self) -> None:
        """Check every ledger of every worker that lives."""
        for member in self.members.values():
            if member.core.is_alive:
                member.core.check()
