"""Who was chosen longest ago: how policies break ties, so that idle workers share the work."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from services.gateway.core.worker import Worker
from shared.ids import Incarnation

MAX_REMEMBERED = 4096
"""Workers whose last choice is remembered; more than can be here at once."""


Memory = Mapping[Incarnation, int] | int | None
"""What a policy keeps from one decision to the next, as a decision's record has it: the last choice
of every worker, a counter, or nothing."""


class Turns:
    """The last choice of every worker."""

    def __init__(self) -> None:
        self._num_decisions = 0
        self._last_chosen: dict[Incarnation, int] = {}

    @property
    def memory(self) -> Memory:
        """A copy of it."""
        return self._last_chosen.copy()

    @memory.setter
    def memory(self, memory: Memory) -> None:
        if isinstance(memory, Mapping):
            self._last_chosen = dict(memory)
            self._num_decisions = max(memory.values(), default=0)

    def longest_ago(self, workers: Sequence[Worker], places: Sequence[int]) -> int:
        """Return that place whose worker was chosen longest ago, or never."""
        if len(places) == 1:
            return places[0]
        last_chosen = self._last_chosen.get
        turns = [last_chosen(workers[place].incarnation, 0) for place in places]
        return places[turns.index(min(turns))]

    def chosen(self, *incarnations: Incarnation) -> None:
        """One decision chose these."""
        self._num_decisions += 1
        for incarnation in incarnations:
            self._last_chosen.pop(incarnation, None)
            self._last_chosen[incarnation] = self._num_decisions
        if len(self._last_chosen) > MAX_REMEMBERED:  # the one chosen longest ago has left
            del self._last_chosen[next(iter(self._last_chosen))]


def least(scores: Sequence[float], places: Sequence[int], equal: float = 0.0) -> Sequence[int]:
    """Return those of these places that have the lowest score of them, in order. equal: or one that
    is higher by at most this share."""
    if isinstance(scores, array) and len(places) == len(scores):
        from services.gateway.core.columns import least_of

        return least_of(scores, equal)
    most = min([scores[place] for place in places]) * (1.0 + equal)
    return [place for place in places if scores[place] <= most]
