"""Policies whose ties go to whoever was chosen longest ago, so that idle workers share the work."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.gateway.core.routing.sides import RoutingPolicy
from services.gateway.core.worker import Worker
from shared.ids import Incarnation


class InTurn(RoutingPolicy):
    """Such a policy. memory: the last choice of every worker, the newest last."""

    def __init__(self) -> None:
        self.memory: dict[Incarnation, int] = {}

    def longest_ago(self, workers: Sequence[Worker], places: Sequence[int]) -> int:
        """Return that place whose worker was chosen longest ago, or never."""
        if len(places) == 1:
            return places[0]
        last_chosen = self.memory.get
        turns = [last_chosen(workers[place].incarnation, 0) for place in places]
        return places[turns.index(min(turns))]

    def chosen(self, *incarnations: Incarnation) -> None:
        """One decision chose these. Its record keeps the memory as it was before."""
        turn = 1 + next(reversed(self.memory.values()), 0)
        self.memory = self.memory.copy()
        for incarnation in incarnations:
            self.memory.pop(incarnation, None)
            self.memory[incarnation] = turn


def least(scores: Sequence[float], places: Sequence[int], equal: float = 0.0) -> Sequence[int]:
    """Return those of these places that have the lowest score of them, in order. equal: or one that
    is higher by at most this share."""
    if isinstance(scores, array) and len(places) == len(scores):
        from services.gateway.core.routing.columns import least_of

        return least_of(scores, equal)
    most = min([scores[place] for place in places]) * (1.0 + equal)
    return [place for place in places if scores[place] <= most]
