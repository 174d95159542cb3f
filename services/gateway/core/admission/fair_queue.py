"""Who is next: strict by priority, fair between tenants, and within one by the earliest deadline.

Fair is VTC, the virtual token counter (Sheng et al., Fairness in Serving Large Language Models,
arXiv 2401.00588, algorithm 2): each tenant has a counter of the work that it was given, prompt
tokens as they are dispatched and output tokens as they come, divided by its weight, and the tenant
with the least is next. A tenant that comes back is lifted to the least of those that wait, so that
who was away has saved nothing up. Of two tenants that wait all the time neither gets more than
``2 U`` of weighted work ahead of the other, ``U`` = the work of what may run at once (theorem 4.4,
whose own U counts all of its tokens at the weight of an output token).

Who waits rises by one priority after each ``ageing_s``, so that no priority starves. Pure: ``now``
is an argument; each operation costs the logarithm of the requests, and the tenants that wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

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
    """Now, with what it has aged."""
    is_let_in: bool = False
    is_waiting: bool = True

    def __post_init__(self) -> None:
        self.priority = self.terms.priority


_Line = list[tuple[float, float, int, QueuedRequest]]
"""A heap by deadline, then by when they came; who waits no more, or elsewhere, is passed over."""


class FairQueue:
    """All requests that wait. weight_of: of a tenant, by name. ageing_s: how long a request waits
    for one priority more."""

    def __init__(self, weight_of: Callable[[str], float], *, ageing_s: float) -> None:
        self._weight_of = weight_of
        self._ageing_s = ageing_s
        self._lines: list[dict[str, _Line]] = [{} for _ in range(MAX_PRIORITY + 1)]
        self._ages: list[tuple[float, int, QueuedRequest]] = []
        self._num_waiting: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._last_left = ""
        self._arrivals = itertools.count()
        self._num_by_priority = [Counter[str]() for _ in range(MAX_PRIORITY + 1)]

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def num_ahead(self, terms: Terms, now: float, may_run: Callable[[str], bool]) -> int:
        """Requests that would be served before one more of these terms: those of a higher priority;
        of its own, those of its tenant, and of each other tenant as many as its weight gives it
        meanwhile. Who waits for a place of its own tenant's holds up no other."""
        self._age(now)
        own = terms.tenant
        equal, *higher = self._num_by_priority[terms.priority :]
        turns = equal[own] / self._weight_of(own)
        num = 0
        for tenant in self._num_waiting:
            if tenant == own or may_run(tenant):
                most = equal[own] if tenant == own else int(turns * self._weight_of(tenant)) + 1
                num += min(equal[tenant], most) + sum(line[tenant] for line in higher)
        return num

    def counter(self, tenant: str) -> float:
        """The weighted work that a tenant was given."""
        return self._counters.get(tenant, 0.0)

    def push(self, request: QueuedRequest, *, was_away: bool = True) -> None:
        """A request waits from now on. was_away: not if one has just been taken out whose place it
        takes: its tenant keeps what it is behind."""
        tenant = request.terms.tenant
        if was_away and tenant not in self._num_waiting:
            self._lift(tenant)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        self._enter(request)
        self._age_later(request, request.since)

    def pass_by(self, tenant: str) -> None:
        """A request of this tenant runs without having waited, as if it had come and gone: what is
        taken while nobody waits is held against nobody."""
        if tenant not in self._num_waiting:
            self._lift(tenant)
        self._last_left = tenant

    def remove(self, request: QueuedRequest) -> None:
        """It waits no more, for whatever reason."""
        if not request.is_waiting:
            return
        request.is_waiting = False
        self._leave_line(request.priority, tenant := request.terms.tenant)
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_left = tenant

    def pop(self, now: float, may_run: Callable[[str], bool]) -> QueuedRequest | None:
        """Take out the next request of a tenant that may run one; None if there is none."""
        self._age(now)
        for lines in reversed(self._lines):
            best: QueuedRequest | None = None
            least = 0.0
            # A copy: ``_first`` deletes a line that turns out to be empty.
            for tenant in list(lines):
                first = self._first(lines, tenant)
                if first is None or not may_run(tenant):
                    continue
                counter = self.counter(tenant)
                # Of equal tenants the earlier arrival: dicts keep the order in which they came.
                if best is None or counter < least:
                    best, least = first, counter
            if best is not None:
                self.remove(best)
                return best
        return None

    def last(self, now: float) -> QueuedRequest | None:
        """Return who would be served last, to make room for others: of the lowest priority that
        waits, of the tenant with the most waiting for its weight, the one with the latest
        deadline, and of those the latest. None whose request was let in."""
        self._age(now)
        for lines in self._lines:
            for tenant in sorted(lines, key=self.share, reverse=True):
                line = (entry for entry in lines[tenant] if not entry[3].is_let_in)
                last = max((it for it in line if self._is_in(lines, it[3])), default=None)
                if last is not None:
                    return last[3]
        return None

    def share(self, tenant: str) -> float:
        """How many of its requests wait, for its weight."""
        return self._num_waiting.get(tenant, 0) / self._weight_of(tenant)

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """A tenant was given so much (or, negative, not so much after all)."""
        work = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._counters[tenant] = self.counter(tenant) + work / self._weight_of(tenant)

    def _lift(self, tenant: str) -> None:
        # Where nobody waits: to the one that left the queue last, as in the paper's algorithm 2.
        floor = min(map(self.counter, self._num_waiting or (self._last_left,)))
        self._counters[tenant] = max(self.counter(tenant), floor)

    def _enter(self, request: QueuedRequest) -> None:
        self._num_by_priority[request.priority][request.terms.tenant] += 1
        line = self._lines[request.priority].setdefault(request.terms.tenant, [])
        heapq.heappush(line, (request.due_at, request.since, next(self._arrivals), request))

    def _leave_line(self, priority: int, tenant: str) -> None:
        """A request is not in this line any more. Who stood before it has gone by now, or will: so
        no line that nobody is served from grows without end."""
        self._num_by_priority[priority][tenant] -= 1
        self._first(self._lines[priority], tenant)

    def _first(self, lines: dict[str, _Line], tenant: str) -> QueuedRequest | None:
        line = lines[tenant]
        while line:
            if self._is_in(lines, line[0][3]):
                return line[0][3]
            heapq.heappop(line)
        del lines[tenant]
        return None

    def _is_in(self, lines: dict[str, _Line], request: QueuedRequest) -> bool:
        return request.is_waiting and self._lines[request.priority] is lines

    def _age_later(self, request: QueuedRequest, now: float) -> None:
        if request.priority < MAX_PRIORITY:
            entry = (now + self._ageing_s, next(self._arrivals), request)
            heapq.heappush(self._ages, entry)

    def _age(self, now: float) -> None:
        while self._ages and self._ages[0][0] <= now:
            at, _, request = heapq.heappop(self._ages)
            if request.is_waiting:
                request.priority += 1
                self._leave_line(request.priority - 1, request.terms.tenant)
                self._enter(request)
                # From when it was due, not from now: it may have come due several times.
                self._age_later(request, at)
