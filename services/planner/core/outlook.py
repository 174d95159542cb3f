"""What a running mesh could still take: which limit binds, how far its load is from that, and which
other split of as many workers would take more.

Closed forms of ``services/gateway/core/scaling/need.py``, as the live planner's; the load is what
was asked of the mesh, at other rates. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from services.gateway.core.scaling.autoscaler import MOST_BUSY, answering, needed
from services.gateway.core.scaling.need import AnswerLoad, Limits, PromptLoad
from services.gateway.core.scaling.scaling import Kind, MeshSeen

EXACT: Final = 0.001
"""Share of a rate to which it is found."""

MOST_RATE: Final = 1e6
_BUSY: Final = dict.fromkeys(Kind, MOST_BUSY)

Numbers = Mapping[Kind, int]


class Outlook(NamedTuple):
    """rate: requests a second that are asked now. binds: who is too few first, and most_rate the
    rate up to which all limits are planned for; 0 = at none. runner_up: the best other split of as
    many workers, and its rate; None = there is only one."""

    rate: float
    binds: Kind
    most_rate: float
    runner_up: tuple[Numbers, float] | None

    @property
    def headroom(self) -> float | None:
        """Of the rate that is asked, so many times; None = nothing is asked."""
        return self.most_rate / self.rate if self.rate else None


def outlook(seen: MeshSeen, limits: Limits) -> Outlook | None:
    """Return what this mesh could take; None: too little is known (``decide`` says what)."""
    here, traffic = [worker for worker in seen.workers if not worker.is_draining], seen.traffic
    present = {kind: num for kind in Kind if (num := sum(it.kind is kind for it in here))}
    is_whole = set(present) in ({Kind.COLOCATED}, {Kind.PREFILL, Kind.DECODE})
    knows = any(it.answer_steps.is_known for it in here if it.kind is not Kind.PREFILL)
    if traffic is None or not (is_whole and knows and traffic.prompt_s):
        return None
    steps, capacity_tokens = answering(here)

    def most_rates(numbers: Numbers) -> dict[Kind, float]:
        """The rates up to which these numbers of each kind are enough."""

        def is_enough(kind: Kind, rate: float) -> bool:
            prompts = PromptLoad.of(traffic, rate)
            answers = AnswerLoad.of(traffic, rate, steps, capacity_tokens, limits.tpot_s)
            return needed(numbers, prompts, answers, limits, _BUSY)[kind] <= numbers[kind]

        return {kind: _most_rate(partial(is_enough, kind)) for kind in numbers}

    rates = most_rates(present)
    binds = min(rates, key=rates.__getitem__)
    total = sum(present.values())
    others: list[Numbers] = [{Kind.COLOCATED: total}]
    others += [{Kind.PREFILL: num, Kind.DECODE: total - num} for num in range(1, total)]
    found = [(it, min(most_rates(it).values())) for it in others if it != present]
    rate = max(traffic.arrivals_s, traffic.recent_s)
    return Outlook(rate, binds, rates[binds], max(found, key=lambda it: it[1], default=None))


def _most_rate(is_enough: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while high < MOST_RATE and is_enough(high):
        low, high = high, 2 * high
    # Where no rate is low enough ``high`` halves for ever: that counts as none.
    while high - low > EXACT * high and high > 1e-6:
        middle = (low + high) / 2
        if is_enough(middle):
            low = middle
        else:
            high = middle
    return low
