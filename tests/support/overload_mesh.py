"""Workers as formulas behind the gateway's admission core, under virtual time: what overload costs.

A prefill worker computes prompts one after the other at so many tokens a second; a decode worker's
step takes ``base_s`` and ``answer_s`` more for each of its answers, and each answer gets a token a
step. Admission, queue, overload and routing policy are the gateway's own; so is a worker's load as
it is known: the report, up to ``report_s`` old, and the orders that it has not seen.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.core.admission.admission import Admission, Admit, Effect, TurnAway
from services.gateway.core.admission.overload import (
    ChosenPair,
    Overload,
    OverloadMode,
    ReportedSpeeds,
)
from services.gateway.core.admission.tenants import Tenants, Terms
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.routing import POLICIES, route
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.ids import Incarnation, StreamId
from shared.predict.step_time import StepFit
from tests.support.routing import a_worker


@dataclass
class Speed(ReportedSpeeds):
    """The analytic workers, whose formulas are known instead of reported."""

    prompt_tokens_per_s: float = 8000.0
    base_s: float = 0.02
    answer_s: float = 0.001

    def queue_s(self, worker: Worker, now: float) -> float:
        return worker.pending_tokens / self.prompt_tokens_per_s

    def prompt_s(self, worker: Worker, num_tokens: int, num_cached: int = 0) -> float:
        return (num_tokens - num_cached) / self.prompt_tokens_per_s

    def step_s(self, worker: Worker, num_others: int, num_tokens: int) -> float:
        return self.base_s + self.answer_s * (num_others + 1)


@dataclass
class Ask:
    """One request of a load."""

    at: float
    num_tokens: int
    num_output: int
    terms: Terms


@dataclass
class Outcome:
    """What became of it. decode_s: from first to last token. wasted_s: prefill seconds for
    nothing."""

    ask: Ask
    ttft_s: float | None = None
    decode_s: float = 0.0
    refusal: str = ""
    hint_s: float = 0.0
    wasted_s: float = 0.0
    is_over: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it was answered within its limits."""
        tpot_s = self.decode_s / max(1, self.ask.num_output - 1)
        terms = self.ask.terms
        has_end = self.is_over and self.ttft_s is not None and not self.refusal
        return has_end and self.ttft_s <= terms.ttft_s and tpot_s <= terms.tpot_s  # type: ignore[operator]


@dataclass
class Prefill:
    worker: Worker
    waiting: deque[bytes] = field(default_factory=deque[bytes])
    running: bytes | None = None
    num_tokens: int = 0
    until: float = 0.0


@dataclass
class Decode:
    """steps: how many a worker that never rested would have made; an answer ends at a number."""

    worker: Worker
    steps: float = 0.0
    at: float = 0.0
    ends: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    version: int = 0


class OverloadMesh:
    """One gateway and its analytic workers."""

    def __init__(
        self,
        mode: str,
        *,
        policy: str = "conductor",
        speed: Speed | None = None,
        num_prefill: int = 4,
        num_decode: int = 4,
        report_s: float = 0.1,
        max_running: int = 100_000,
        max_waiting: int = 100_000,
        max_wait_s: float = 60.0,
        max_pending_tokens: int = 8192,
        tenants: Tenants | None = None,
    ) -> None:
        self.now = 0.0
        self.speed = speed or Speed()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._policy, self._chance = POLICIES[policy](), random.Random(7)
        self._table = PeerTable()
        self._prefills = [
            Prefill(a_worker(Role.PREFILL, 1 + idx, num_blocks=1 << 20))
            for idx in range(num_prefill)
        ]
        self._decodes = [
            Decode(a_worker(Role.DECODE, 101 + idx, num_blocks=1 << 20))
            for idx in range(num_decode)
        ]
        self._partners: dict[Incarnation, frozenset[Incarnation]] = dict.fromkeys(
            [it.worker.incarnation for it in self._prefills],
            frozenset(it.worker.incarnation for it in self._decodes),
        )
        for it in (*self._prefills, *self._decodes):
            self._table.join(it.worker)
        self._report_s = report_s
        self._stream_ids = itertools.count(1)
        self._heard: dict[int, StreamId] = {}
        self._pairs: dict[bytes, tuple[Prefill, Decode, StreamId]] = {}
        self.outcomes: dict[bytes, Outcome] = {}
        self.admission = Admission(
            max_running=max_running,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            overload=Overload(OverloadMode(mode)),
            sides=lambda: self._table.sides,
            tenants=tenants,
            max_pending_tokens=max_pending_tokens,
        )

    def run(self, load: list[Ask]) -> list[Outcome]:
        """Let all of it come, and end."""
        self._tell_all()
        for number, ask in enumerate(load):
            key = number.to_bytes(8, "big")
            self._at(ask.at, lambda key=key, ask=ask: self._arrive(key, ask))
        last = load[-1].at
        self._at(self._report_s, lambda: self._report(last + 600.0))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            due_at = self.admission.next_tick_at
            if due_at is not None and (not self._events or due_at <= self._events[0][0]):
                self.now = max(self.now, due_at)
                self._apply(self.admission.tick(self.now))
        return list(self.outcomes.values())

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _report(self, until: float) -> None:
        self._tell_all()
        if self._events and self.now < until:
            self._at(self.now + self._report_s, lambda: self._report(until))

    def _tell_all(self) -> None:
        speed = self.speed
        for prefill in self._prefills:
            waiting = sum(self.outcomes[key].ask.num_tokens for key in prefill.waiting)
            self._tell(
                prefill.worker,
                pending_tokens=waiting + prefill.num_tokens,
                num_waiting=len(prefill.waiting),
                num_running=int(prefill.running is not None),
                queue_s=waiting / speed.prompt_tokens_per_s + max(0.0, prefill.until - self.now),
                prompt_steps=StepFit(0.0, 1.0 / speed.prompt_tokens_per_s, num_steps=50),
            )
        for decode in self._decodes:
            orders = decode.worker.orders.values()
            self._tell(
                decode.worker,
                num_running=len(decode.ends),
                num_answers=len(orders),
                reserved_blocks=sum(order.num_blocks for order in orders),
                answer_steps=StepFit(speed.base_s, speed.answer_s, num_steps=50),
            )

    def _tell(self, worker: Worker, **load: Any) -> None:
        heard = self._heard.get(worker.incarnation, StreamId(0))
        status = WorkerStatus(
            **load,
            paired=self._partners.get(worker.incarnation, frozenset()),
            seen=heard,
        )
        self._table.report(worker, status, self.now)
        self._apply(self.admission.changed(self.now, worker))

    # --- requests ---------------------------------------------------------------------------------

    def _arrive(self, key: bytes, ask: Ask) -> None:
        self.outcomes[key] = Outcome(ask)
        self._apply(
            self.admission.arrive(key, self.now, terms=ask.terms, num_tokens=ask.num_tokens)
        )

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Admit(key):
                    self._dispatch(key)
                case TurnAway(key, error):
                    outcome = self.outcomes[key]
                    outcome.refusal, outcome.hint_s = error.code or error.type, error.retry_after_s
                    outcome.is_over = True
                    self._at(self.now, lambda key=key: self._leave(key))

    def _leave(self, key: bytes) -> None:
        self._apply(self.admission.leave(key, self.now))

    def _dispatch(self, key: bytes) -> None:
        ask, stream_id = self.outcomes[key].ask, StreamId(next(self._stream_ids))
        request = RouteRequest(
            ask.num_tokens,
            ask.num_output,
            affinity=self._chance.getrandbits(64),
            now=self.now,
        )
        decision = route(self._policy, request, self._table.sides, self._chance.random())
        assert decision is not None
        prefill, decode = self._prefills[decision.places[0]], self._decodes[decision.places[1]]
        pair = ChosenPair(prefill.worker, decode.worker)
        effects = self.admission.pair_found(key, pair, self.now)
        if any(isinstance(it, TurnAway) for it in effects):
            self._apply(effects)
            return
        for worker, role in ((prefill.worker, Role.PREFILL), (decode.worker, Role.DECODE)):
            computes = role is Role.PREFILL
            worker.ordered(role, stream_id, ask.num_tokens, computes=computes, now=self.now)
        self._pairs[key] = prefill, decode, stream_id
        self._heard[prefill.worker.incarnation] = stream_id
        self._heard[decode.worker.incarnation] = stream_id
        prefill.waiting.append(key)
        self._next_prompt(prefill)
        self._apply(effects)

    def _next_prompt(self, prefill: Prefill) -> None:
        if prefill.running is not None or not prefill.waiting:
            return
        key = prefill.running = prefill.waiting.popleft()
        prefill.num_tokens = self.outcomes[key].ask.num_tokens
        seconds = self.speed.prompt_s(prefill.worker, prefill.num_tokens)
        prefill.until = self.now + seconds
        self._at(prefill.until, lambda: self._computed(prefill, key, seconds))

    def _computed(self, prefill: Prefill, key: bytes, seconds: float) -> None:
        prefill.running, prefill.num_tokens = None, 0
        _, decode, stream_id = self._pairs[key]
        prefill.worker.computed(stream_id)
        prefill.worker.ended(stream_id)
        self._next_prompt(prefill)
        outcome = self.outcomes[key]
        refusals = self.admission.prompt_computed(key, self.now)
        if refusals:
            outcome.wasted_s = seconds
            decode.worker.ended(stream_id)
            self._apply(refusals)
            return
        outcome.ttft_s = self.now - outcome.ask.at
        admitted = self.admission.emitted(key, 1, self.now, cached_tokens=0)
        self._progress(decode)
        heapq.heappush(decode.ends, (decode.steps + outcome.ask.num_output - 1, key))
        self._plan(decode)
        self._apply(admitted)

    def _progress(self, decode: Decode) -> None:
        if decode.ends:
            step_s = self.speed.step_s(decode.worker, len(decode.ends) - 1, 0)
            decode.steps += (self.now - decode.at) / step_s
        decode.at = self.now

    def _plan(self, decode: Decode) -> None:
        decode.version += 1
        version = decode.version
        if decode.ends:
            step_s = self.speed.step_s(decode.worker, len(decode.ends) - 1, 0)
            left_s = max(0.0, decode.ends[0][0] - decode.steps) * step_s
            self._at(self.now + left_s, lambda: self._answered(decode, version))

    def _answered(self, decode: Decode, version: int) -> None:
        if version != decode.version:
            return
        self._progress(decode)
        _, key = heapq.heappop(decode.ends)
        outcome = self.outcomes[key]
        outcome.is_over = True
        assert outcome.ttft_s is not None
        outcome.decode_s = self.now - outcome.ask.at - outcome.ttft_s
        decode.worker.ended(self._pairs[key][2])
        self.admission.emitted(key, outcome.ask.num_output - 1, self.now, cached_tokens=0)
        self._plan(decode)
        self._leave(key)


def a_load(
    rate_per_s: float,
    seconds: float,
    *,
    seed: int = 1,
    mean_tokens: float = 4000.0,
    mean_output: float = 200.0,
    spread: float = 0.8,
    **terms: Any,
) -> list[Ask]:
    """Poisson arrivals with lognormal lengths. terms: of all of them."""
    chance = random.Random(seed)
    at, load = 0.0, list[Ask]()
    while at < seconds:
        at += chance.expovariate(rate_per_s)
        shift = spread * spread / 2
        num_tokens = round(mean_tokens * chance.lognormvariate(-shift, spread))
        num_output = round(mean_output * chance.lognormvariate(-shift, spread))
        load.append(Ask(at, max(1, num_tokens), max(2, num_output), Terms(**terms)))
    return load
