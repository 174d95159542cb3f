"""Admission: run now, wait a bounded while, or be refused with a hint when to come back.

The bound on requests inside the gateway is what keeps every later queue, buffer and map bounded as
well. Who waits is next by ``fair_queue.py``; who would miss its own limits is refused by
``overload.py``. Pure: every event returns what is to be done, in order; ``now`` is an argument, and
``next_tick_at`` says when to look again.

A request with several answers is refused before its first token or not at all: it is let in with
its first answer, and the others, which come afterwards, wait until its deadline. One of them at a
time stands in the queue, and each comes there as a new request would: so many answers take no more
turns than a request with one.

A place is not all that is waited for: while the workers have enough (``work_ahead.py``), the rest
is held here, where priority and fairness decide. Who waits for that alone is not refused for it;
but where nobody can be asked, nobody waits for that longer than ``max_wait_s``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.core.admission.fair_queue import FairQueue, QueuedRequest, let_go
from services.gateway.core.admission.overload import (
    Asking,
    Cached,
    ChosenPair,
    Forecast,
    Overload,
    OverloadMode,
    late,
)
from services.gateway.core.admission.tenants import Tenants, Terms
from services.gateway.core.admission.work_ahead import Work, WorkAhead
from services.gateway.core.dispatcher import no_pair
from services.gateway.core.routing.sides import NO_HITS, Sides
from services.gateway.core.worker import Worker
from shared.errors import DeadlinePassed, MeshError, Overloaded

REASONS = ("queue_full", "queue_timeout", "deadline", "no_pair", "slo_ttft", "slo_tbt", "slo_both")
"""Codes of what admission refuses, but for a gateway that shuts down."""

AGEING_S = 60.0
"""How long a request waits for one priority more: so long that a tenant's flood does not become
urgent by waiting. Where nobody waits for workers, and so for ``max_wait_s`` at most, it is a
quarter of that."""

_NEW_GAP_SHARE = 0.1
"""Of the newest gap in the mean time between two that leave the queue."""


class Admit(NamedTuple):
    """This request runs from now on."""

    key: bytes


class TurnAway(NamedTuple):
    """This request does not run."""

    key: bytes
    error: MeshError


Effect = Admit | TurnAway


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts at one moment. refusals: how many by their reason's code, since the start."""

    num_running: int
    num_waiting: int
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_refused(self) -> int:
        """All refusals together."""
        return sum(self.refusals.values())


@dataclass(slots=True, kw_only=True)
class _Request(Work):
    """One answer to a request in the gateway. came_at: here; arrived_at: from when its time to the
    first token counts. cached: what workers have of its prompt at a time. follows: see ``arrive``.
    may_be_refused: no answer of the request has a token. limit_at: it waits in the queue until
    its first token is late; inf = as long as anybody may."""

    key: bytes
    terms: Terms
    came_at: float
    arrived_at: float
    deadline_at: float
    cached: Cached
    follows: bytes
    may_be_refused: bool
    limit_at: float = math.inf
    queued: QueuedRequest | None = None

    @property
    def priority(self) -> int:
        """At which it runs: with what it has aged."""
        return self.terms.priority if self.queued is None else self.queued.priority


class Admission:
    """Who runs and who waits.

    Keys are any hashable that names a request; each is admitted at most once. sides: who can be
    asked at this moment, and where nobody can, why_not_ready: one sentence. max_pending_tokens: see
    ``WorkAhead``.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_wait_s: float,
        overload: Overload,
        sides: Callable[[], Sides],
        why_not_ready: Callable[[], str] = lambda: "",
        tenants: Tenants | None = None,
        max_pending_tokens: int = 0,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._overload = overload
        self._sides, self._why_not_ready = sides, why_not_ready
        self.tenants = tenants or Tenants()
        self._queue = FairQueue(
            lambda name: self.tenants.tenant(name).weight,
            self._may_run,
            ageing_s=AGEING_S if max_pending_tokens else max_wait_s / 4,
        )
        self._running: dict[bytes, _Request] = {}
        self._work_ahead = WorkAhead(max_pending_tokens, sides, self._running.values())
        self._waiting: dict[bytes, _Request] = {}
        # Of each request of which a further answer is in the queue: those that come after it.
        self._behind: dict[bytes, deque[_Request]] = {}
        self._num_of_tenant: Counter[str] = Counter()
        self._give_up: list[tuple[float, bytes]] = []
        self._refusals: Counter[str] = Counter()
        self._left_at = 0.0
        self._gap_s = 0.0
        self._nobody_since: float | None = None  # None = somebody can be asked

    # --- events ---------------------------------------------------------------------------------

    def arrive(
        self,
        key: bytes,
        now: float,
        *,
        terms: Terms = Terms(),  # noqa: B008
        num_tokens: int = 0,
        arrived_at: float | None = None,
        deadline_at: float | None = None,
        cached: Cached = lambda now: NO_HITS,
        follows: bytes = b"",
    ) -> list[Effect]:
        """A request comes. arrived_at: when its first byte did, None = now. cached: asked only
        where it may be refused by a prediction. follows: the first answer of the request, which was
        admitted, if this is a further one."""
        request = _Request(
            key=key,
            terms=terms,
            num_tokens=num_tokens,
            came_at=now,
            arrived_at=now if arrived_at is None else arrived_at,
            deadline_at=math.inf if deadline_at is None else deadline_at,
            cached=cached,
            follows=follows,
            may_be_refused=not follows,
        )
        if now >= request.deadline_at:
            error = DeadlinePassed("the deadline passed before the request was admitted")
            return [self._refused(request, error)]
        self._can_ask(now)
        has_place = not (self._waiting or self._is_full) and self._may_run(terms.tenant)
        if has_place:  # it is judged as soon as its pair is known
            self._queue.pass_by(terms.tenant, terms.priority)
            return [self._admit(request)]
        if request.may_be_refused and terms.has_limit:
            queue_s = self._queue.num_ahead(terms, now) * self._gap_s
            asking = self._asking(request, now + queue_s)
            error = self._overload.late_anywhere(asking, self._sides(), now, cached)
            if error is not None:
                return [self._refused(request, error)]
        self._wait(request, now)
        # If only tenants at their own limit are in the queue, one of another tenant runs at once.
        effects = self._fill(now)
        # Further answers of requests that were let in do not count: they make room for nobody.
        most = self._max_waiting
        if self._work_ahead.is_enough:  # then those wait here, too, for which there are places
            most += self._max_running - len(self._running)
        if len(self._queue) - len(self._behind) > most:
            last = self._queue.last(now)
            assert last is not None
            effects.append(self._make_room(self._waiting[last.key]))
        return effects

    def changed(self, now: float, worker: Worker | None = None) -> Sequence[Effect]:
        """Who can be asked has changed, or this worker has told of itself."""
        if worker is not None:
            self._work_ahead.reported(worker)
        self._can_ask(now)
        return self._fill(now)

    def pair_found(self, key: bytes, pair: ChosenPair, now: float) -> Sequence[Effect]:
        """Routing has named a pair for an attempt of a request that runs: it is sent there now, and
        then others are let in; or it would be late, and is turned away alone."""
        request = self._running.get(key)
        if request is None:
            return ()
        if request.may_be_refused and request.terms.has_limit:
            error = self._overload.late_at(self._asking(request, now), pair, now)
            if error is not None:
                return [self._refused(request, error)]
        self._work_ahead.sent(request, pair)
        self._overload.dispatched(key, pair, request.num_tokens, now)
        return self._fill(now)  # what a cache has is not computed

    def granted(self, key: bytes, now: float) -> Sequence[Effect]:
        """Decode has room for it."""
        request = self._running.get(key)
        if request is None:
            return ()
        self._work_ahead.granted(request)
        return self._fill(now)

    def prompt_computed(self, key: bytes, now: float) -> list[TurnAway]:
        """The first token of its attempt is there, and has not been handed on."""
        request = self._running.get(key)
        if request is None or request.decode is None:
            return []
        if not request.may_be_refused:
            self._goes_on(request)  # before its token is handed on: the two may come together
            return []
        error = self._overload.refusal_at_decode(
            request.terms, request.num_tokens, request.decode, now
        )
        return [] if error is None else [self._refused(request, error)]

    def emitted(
        self, key: bytes, num_tokens: int, now: float, *, cached_tokens: int
    ) -> Sequence[Effect]:
        """Tokens of an answer were handed on. cached_tokens: of its prompt, not computed."""
        request = self._running.get(key)
        if request is None:
            return ()
        tenant, priority = request.terms.tenant, request.priority
        if request.has_begun:
            self._queue.charge(tenant, priority, output_tokens=num_tokens)
            return ()
        self._work_ahead.began(request)
        self._goes_on(request)
        self._overload.began(key, now)
        self._queue.charge(tenant, priority, prompt_tokens=-cached_tokens, output_tokens=num_tokens)
        return self._fill(now)

    def leave(self, key: bytes, now: float) -> list[Effect]:
        """A request is over, or its client has gone; whoever may run now is admitted."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None and waiting.queued is not None:
            self._queue.remove(waiting.queued)
            self._next_answer(waiting, now)
        request = self._running.pop(key, None)
        if request is not None:
            tenant = request.terms.tenant
            self._num_of_tenant[tenant] -= 1
            if request.prefill is None:  # no pair was found for it
                self._queue.charge(tenant, request.priority, prompt_tokens=-request.num_tokens)
            self._overload.ended(key, now)
            self._work_ahead.ended(request)
        return self._fill(now)

    @property
    def next_tick_at(self) -> float | None:
        """When somebody has waited too long; None = nobody waits."""
        let_go(self._give_up, len(self._waiting), lambda entry: entry[1] in self._waiting)
        while self._give_up and self._give_up[0][1] not in self._waiting:
            heapq.heappop(self._give_up)
        return self._give_up[0][0] if self._give_up else None

    def tick(self, now: float) -> list[Effect]:
        """TurnAway who has waited too long."""
        self._can_ask(now)
        effects: list[Effect] = []
        while (due_at := self.next_tick_at) is not None and due_at <= now:
            _, key = heapq.heappop(self._give_up)
            request = self._waiting[key]
            error = self._waited_too_long(request, now)
            if error is None:
                self._look_after(request, now)
                continue
            effects.append(self._refused(request, error))
            self._next_answer(request, now)
        return effects

    def close(self, error: MeshError) -> list[Effect]:
        """TurnAway everybody who waits."""
        self._behind.clear()
        return [self._refused(request, error) for request in list(self._waiting.values())]

    def statistics(self) -> AdmissionStatistics:
        """Return the counts."""
        return AdmissionStatistics(len(self._running), len(self._waiting), dict(self._refusals))

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._max_running or self._work_ahead.is_enough

    def _can_ask(self, now: float) -> bool:
        """Whether anybody can take a request; if not, it is noted since when."""
        if self._sides():
            self._nobody_since = None
        elif self._nobody_since is None:
            self._nobody_since = now
        return self._nobody_since is None

    def _may_run(self, tenant: str) -> bool:
        most = self.tenants.tenant(tenant).max_running
        return most is None or self._num_of_tenant[tenant] < most

    def _admit(self, request: _Request) -> Admit:
        tenant = request.terms.tenant
        self._running[request.key] = request
        self._num_of_tenant[tenant] += 1
        self._work_ahead.admitted(request)
        self._queue.charge(tenant, request.priority, prompt_tokens=request.num_tokens)
        return Admit(request.key)

    def _goes_on(self, request: _Request) -> None:
        """A token of this answer: none of its request is refused any more."""
        request.may_be_refused = False
        if (first := self._running.get(request.follows)) is not None:
            first.may_be_refused = False

    def _wait(self, request: _Request, now: float) -> None:
        self._waiting[request.key] = request
        # Told once: the mode may be another when the time is up.
        if request.may_be_refused and self._overload.mode is not OverloadMode.OFF:
            request.limit_at = request.arrived_at + request.terms.ttft_s
        self._look_after(request, now)
        others = self._behind.get(request.follows)
        if others is not None:
            others.append(request)
            return
        if not self._queue:
            self._left_at = now  # gaps are those while somebody waits, however long nobody did
        if request.follows:
            self._behind[request.follows] = deque()
        self._line_up(request, now)

    def _look_after(self, request: _Request, now: float) -> None:
        """Ask at some time whether it has waited too long: not later than anybody may."""
        at = min(self._most_without_workers(request, now), request.limit_at, request.deadline_at)
        heapq.heappush(self._give_up, (at, request.key))

    def _most_without_workers(self, request: _Request, now: float) -> float:
        since = now if self._nobody_since is None else self._nobody_since
        return max(since, request.came_at) + self._max_wait_s

    def _line_up(self, request: _Request, now: float, *, was_away: bool = True) -> None:
        came_at = now if request.follows else request.arrived_at
        request.queued = QueuedRequest(
            request.key,
            request.terms,
            now,
            came_at + request.terms.ttft_s,
            is_let_in=bool(request.follows),
        )
        self._queue.push(request.queued, was_away=was_away)

    def _next_answer(self, request: _Request, now: float) -> None:
        """This one has left the queue: the next answer of its request comes there."""
        others = self._behind.pop(request.follows, None)
        while others:
            other = others.popleft()
            if other.key in self._waiting:
                self._behind[request.follows] = others
                self._line_up(other, now, was_away=False)
                return

    def _fill(self, now: float) -> list[Effect]:
        """Admit whoever is next, as long as there is a place."""
        effects: list[Effect] = []
        while self._waiting and not self._is_full:
            queued = self._queue.pop(now)
            if queued is None:
                break
            request = self._waiting.pop(queued.key)
            self._gap_s += _NEW_GAP_SHARE * (now - self._left_at - self._gap_s)
            self._left_at = now
            self._next_answer(request, now)
            effects.append(self._admit(request))
        return effects

    @staticmethod
    def _asking(request: _Request, sent_at: float) -> Asking:
        return Asking(request.terms, request.num_tokens, sent_at - request.arrived_at)

    def _waited_too_long(self, request: _Request, now: float) -> MeshError | None:
        """Return why it waits no more. Who waits for nothing but the workers, which have enough,
        waits on: that has no limit but its own and its deadline."""
        if now >= request.deadline_at:
            return DeadlinePassed("the deadline passed in the queue")
        if now >= request.limit_at:
            waited_s = now - request.arrived_at
            # At the instant of the timer the limit is reached, and not yet missed: hence the 1 ms.
            return late(request.terms, Forecast(waited_s + 1e-3, 0.0))
        if self._nobody_since is None:
            has_place = len(self._running) < self._max_running
            may_wait = request.limit_at < math.inf or not request.may_be_refused
            if may_wait or (has_place and self._may_run(request.terms.tenant)):
                return None
            return Overloaded(
                f"no place came free within {self._max_wait_s:g} s{self._own_limit(request)}",
                code="queue_timeout",
                retry_after_s=max(1.0, self._max_wait_s),
            )
        if now < self._most_without_workers(request, now):
            return None
        return no_pair(self._why_not_ready())

    def _make_room(self, request: _Request) -> TurnAway:
        waiting = f"{len(self._waiting) - 1} wait{self._own_limit(request)}"
        error = Overloaded(
            f"{len(self._running)} requests run and {waiting}: try again soon",
            code="queue_full",
            retry_after_s=max(1.0, self._max_wait_s),
        )
        return self._refused(request, error)

    def _own_limit(self, request: _Request) -> str:
        """Say so, if it is its tenant's own limit that keeps it from running."""
        tenant = request.terms.tenant
        if self._may_run(tenant):
            return ""
        most = self.tenants.tenant(tenant).max_running
        return f", and of this API key {most} run, as many as may (max_running)"

    def _refused(self, request: _Request, error: MeshError) -> TurnAway:
        self._waiting.pop(request.key, None)
        if request.queued is not None:
            self._queue.remove(request.queued)
        self._refusals[error.code or error.type] += 1
        return TurnAway(request.key, error)
