"""Who is next: strict by priority, fair between tenants, and within one by the earliest deadline.

Fair is VTC, the virtual token counter (Sheng et al., Fairness in Serving Large Language Models,
arXiv 2401.00588, algorithm 2): each tenant has a counter of the work that it was given, prompt
tokens as they are dispatched and output tokens as they come, divided by its weight, and the tenant
with the least is next. A tenant that comes back is lifted to the least of those that wait, so that
who was away has saved nothing up; neither has one that waited for its own tenant's places while
others were served. Of two tenants that wait all the time neither gets more than ``2 U`` of weighted
work ahead of the other, ``U`` = the work of what may run at once (theorem 4.4, whose own U counts
all of its tokens at the weight of an output token).

Each priority has counters of its own: what is served before others says nothing of what is fair
among those, and one that hardly gets a turn there is no measure for who comes back here.

Who waits rises by one priority after each ``ageing_s``, so that no priority starves. Pure: ``now``
is an argument; each operation costs the logarithm of the requests, and the tenants that wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.core.admission.tenants import Terms
from shared.tenants import MAX_PRIORITY

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token holds the device longer than one of a prompt (the paper's own choice)."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request that waits. due_at: when its first token is late, inf = it has no limit.
    is_let_in: another answer of it was, so that it makes room for nobody."""

    key: bytes
    terms: Terms
    since: float
    due_at: float
    priority: int = field(init=False)
    """Now, or when it left, with what it has aged."""
    is_let_in: bool = False
    is_waiting: bool = True

    def __post_init__(self) -> None:
        self.priority = self.terms.priority


_Line = list[tuple[float, float, int, QueuedRequest]]
"""A heap by deadline, then by when they came; who waits no more, or elsewhere, is passed over and
let go of in time."""


def let_go(heap: list[Any], num_live: int, is_live: Callable[[Any], bool]) -> None:
    """Forget who has left, where most of a heap has: else they stay until they come to its top."""
    if len(heap) > 2 * num_live + 16:
        heap[:] = filter(is_live, heap)
        heapq.heapify(heap)


class _Equals:
    """Who waits at one priority, and what each tenant was given there. lines: by tenant."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.num_waiting = Counter[str]()
        self.counters: dict[str, float] = {}
        self.last_left = ""
        self.passed_over: set[str] = set()
        """Who might have been next, but for its own tenant's places."""

    def counter(self, tenant: str) -> float:
        return self.counters.get(tenant, 0.0)


class FairQueue:
    """All requests that wait. weight_of: of a tenant, by name. may_run: whether one may run a
    request more. ageing_s: how long a request waits for one priority more."""

    def __init__(
        self,
        weight_of: Callable[[str], float],
        may_run: Callable[[str], bool],
        *,
        ageing_s: float,
    ) -> None:
        self._weight_of, self._may_run = weight_of, may_run
        self._ageing_s = ageing_s
        self._equals = [_Equals() for _ in range(MAX_PRIORITY + 1)]
        self._ages: list[tuple[float, int, QueuedRequest]] = []
        self._num = 0
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return self._num

    def num_ahead(self, terms: Terms, now: float) -> int:
        """Requests that would be served before one more of these terms: those of a higher priority;
        of its own, those of its tenant, and of each other tenant as many as its weight gives it
        meanwhile. Who waits for a place of its own tenant's holds up no other."""
        self._age(now)
        own = terms.tenant
        equal, *higher = [equals.num_waiting for equals in self._equals[terms.priority :]]
        turns = equal[own] / self._weight_of(own)
        num = 0
        for tenant, num_waiting in sum(higher, +equal).items():
            if tenant == own:
                num += num_waiting
            elif self._may_run(tenant):
                most = int(turns * self._weight_of(tenant)) + 1
                num += num_waiting - max(0, equal[tenant] - most)
        return num

    def counter(self, tenant: str, priority: int) -> float:
        """The weighted work that a tenant was given at a priority."""
        return self._equals[priority].counter(tenant)

    def push(self, request: QueuedRequest, *, was_away: bool = True) -> None:
        """A request waits from now on. was_away: not if one has just been taken out whose place it
        takes: its tenant keeps what it is behind."""
        self._num += 1
        self._enter(request, was_away=was_away)
        self._age_later(request, request.since)

    def pass_by(self, tenant: str, priority: int) -> None:
        """A request of this tenant runs without having waited, as if it had come and gone: what is
        taken while nobody waits is held against nobody."""
        equals = self._equals[priority]
        if not equals.num_waiting[tenant]:
            self._lift(equals, tenant)
        equals.last_left = tenant

    def remove(self, request: QueuedRequest) -> None:
        """It waits no more, for whatever reason."""
        if not request.is_waiting:
            return
        request.is_waiting = False
        self._num -= 1
        self._leave_line(self._equals[request.priority], request.terms.tenant)
        let_go(self._ages, self._num, lambda entry: entry[2].is_waiting)

    def pop(self, now: float) -> QueuedRequest | None:
        """Take out the next request of a tenant that may run one; None if there is none."""
        self._age(now)
        for equals in reversed(self._equals):
            best: QueuedRequest | None = None
            least = 0.0
            for tenant, line in equals.lines.items():
                if not self._may_run(tenant):
                    equals.passed_over.add(tenant)
                    continue
                if tenant in equals.passed_over:
                    equals.passed_over.remove(tenant)
                    self._lift(equals, tenant)
                counter = equals.counter(tenant)
                # Of equal tenants the earlier arrival: dicts keep the order in which they came.
                if best is None or counter < least:
                    best, least = line[0][3], counter
            if best is not None:
                self.remove(best)
                return best
        return None

    def last(self, now: float) -> QueuedRequest | None:
        """Return who would be served last, to make room for others: of the lowest priority that
        waits, of the tenant with the most waiting for its weight, the one with the latest
        deadline, and of those the latest. None whose request was let in."""
        self._age(now)
        for equals in self._equals:
            for tenant in sorted(equals.lines, key=self.share, reverse=True):
                line = (entry for entry in equals.lines[tenant] if not entry[3].is_let_in)
                last = max((it for it in line if self._is_in(equals, it[3])), default=None)
                if last is not None:
                    return last[3]
        return None

    def share(self, tenant: str) -> float:
        """How many of its requests wait, for its weight."""
        num = sum(equals.num_waiting[tenant] for equals in self._equals)
        return num / self._weight_of(tenant)

    def charge(
        self, tenant: str, priority: int, *, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        """A tenant was given so much (or, negative, not so much after all)."""
        work = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        equals = self._equals[priority]
        equals.counters[tenant] = equals.counter(tenant) + work / self._weight_of(tenant)

    def _lift(self, equals: _Equals, tenant: str) -> None:
        # Who waits for its own places stands still, however much the others are given.
        waiting = [it for it in equals.lines if it != tenant and self._may_run(it)]
        # Where nobody waits: to the one that left last, as in the paper's algorithm 2.
        floor = min(map(equals.counter, waiting or (equals.last_left,)))
        equals.counters[tenant] = max(equals.counter(tenant), floor)

    def _enter(self, request: QueuedRequest, *, was_away: bool = True) -> None:
        equals, tenant = self._equals[request.priority], request.terms.tenant
        if was_away and not equals.num_waiting[tenant]:
            self._lift(equals, tenant)
        equals.num_waiting[tenant] += 1
        line = equals.lines.setdefault(tenant, [])
        heapq.heappush(line, (request.due_at, request.since, next(self._arrivals), request))

    def _leave_line(self, equals: _Equals, tenant: str) -> None:
        """A request is not in this line any more: its first one still waits, or there is none."""
        equals.num_waiting[tenant] -= 1
        line = equals.lines[tenant]
        let_go(line, equals.num_waiting[tenant], lambda entry: self._is_in(equals, entry[3]))
        while line and not self._is_in(equals, line[0][3]):
            heapq.heappop(line)
        if not line:
            del equals.lines[tenant]
            equals.last_left = tenant

    def _is_in(self, equals: _Equals, request: QueuedRequest) -> bool:
        return request.is_waiting and self._equals[request.priority] is equals

    def _age_later(self, request: QueuedRequest, now: float) -> None:
        if request.priority < MAX_PRIORITY:
            entry = (now + self._ageing_s, next(self._arrivals), request)
            heapq.heappush(self._ages, entry)

    def _age(self, now: float) -> None:
        while self._ages and self._ages[0][0] <= now:
            at, _, request = heapq.heappop(self._ages)
            if request.is_waiting:
                request.priority += 1
                self._leave_line(self._equals[request.priority - 1], request.terms.tenant)
                self._enter(request)
                # From when it was due, not from now: it may have come due several times.
                self._age_later(request, at)
