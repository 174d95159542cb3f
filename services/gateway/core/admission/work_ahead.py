"""What the workers have of this gateway's requests: enough that none of them waits for work, and
not much more, since only what waits in the gateway is still in a fair order.

Their own queues are first come, first served: a prompt of a high priority, or of a tenant that asks
for little, would stand behind everything that was sent before; and one for which decode has no room
would keep its KV on prefill meanwhile.

Of several gateways each may give the workers its share, whatever the others do, and more as far as
the workers report that the others leave it: prompts a few with each report, since in a burst all of
them see at first that the workers have nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.core.admission.overload import ChosenPair
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Worker
from shared.ids import Incarnation

PROMPTS_AHEAD = 4
"""So many prompts a prefill worker may always have: one that it computes, and others on their
way."""

ANSWERS_AHEAD = 2
"""So many answers may wait for room on a decode worker: it is taken as soon as it comes free."""


STEPS = 4
"""In so many reports what a worker has ahead may rise from nothing to its bound."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one answer asks of the workers. num_tokens: of its prompt. num_cached: of these need not
    be computed. has_begun: its first token is there. has_room: decode has promised it room for its
    KV, or it needs none. prefill, decode: where it was sent last, None = nowhere; decode None = to
    a prefill worker alone. Changed by ``WorkAhead`` alone while it counts it."""

    num_tokens: int
    num_cached: int = 0
    has_begun: bool = False
    has_room: bool = False
    prefill: Worker | None = None
    decode: Worker | None = None


class _Told(NamedTuple):
    """What a worker said of itself. share: of it that is this gateway's. num_places: answers that
    it runs at once, 0 = unknown. tokens, answers: that it has of other gateways."""

    share: float
    num_places: int
    tokens: int
    answers: int


class _Side:
    """The workers of one side, added up: each report changes the sums by what is new in it."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.told: dict[Incarnation, _Told] = {}
        self.share = self.own_places = 0.0
        self.num_places = self.num_unknown = self.others_tokens = self.others_answers = 0
        for worker in workers:
            self._add(worker, 1)

    def reported(self, worker: Worker) -> bool:
        """A worker has told something new of itself; returns whether it is of this side."""
        if worker.incarnation not in self.told:
            return False
        self._add(worker, -1)
        self._add(worker, 1)
        return True

    @property
    def num_workers(self) -> int:
        """All of the side."""
        return len(self.told)

    def _add(self, worker: Worker, times: int) -> None:
        if times > 0:
            status = worker.status
            told = self.told[worker.incarnation] = _Told(
                1.0 / max(1, status.num_gateways),
                status.max_running,
                worker.others_tokens,
                worker.others_answers,
            )
        else:
            told = self.told[worker.incarnation]
        self.share += times * told.share
        self.own_places += times * told.share * told.num_places
        self.num_places += times * told.num_places
        self.num_unknown += times * (not told.num_places)
        self.others_tokens += times * told.tokens
        self.others_answers += times * told.answers


class WorkAhead:
    """The sum of all that those have who can be asked: for what one that drains or is silent still
    has, no other is left idle.

    max_pending_tokens: prompt tokens that each prefill worker has ahead, in the mean; 0 = as many
    as come. sides: who can be asked at this moment. works: all that were admitted and have not
    ended.
    """

    def __init__(
        self, max_pending_tokens: int, sides: Callable[[], Sides], works: Iterable[Work]
    ) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._sides = sides
        self._works = works
        self._most_yet = 0
        self._count_anew(Sides([], [], []))

    def _count_anew(self, sides: Sides) -> None:
        self._counted = sides
        self._prefills, self._decodes = _Side(sides.prefills), _Side(sides.decodes)
        self._num_prompts = self._num_to_compute = self._num_answers = 0
        self._num_roomless = self._roomless_tokens = 0
        for work in self._works:
            self._count(work, 1)

    def reported(self, worker: Worker) -> None:
        """A worker has told something new of itself."""
        self._decodes.reported(worker)
        if self._prefills.reported(worker):
            self._most_yet = self._num_to_compute + self._max_pending_tokens // STEPS

    def admitted(self, work: Work) -> None:
        """A prompt goes to a worker."""
        self._count(work, 1)

    def sent(self, work: Work, pair: ChosenPair) -> None:
        """It has gone, perhaps once more."""
        self._count(work, -1)
        work.prefill, work.decode, work.num_cached = pair.prefill, pair.decode, pair.num_cached
        work.has_room = pair.decode is None or pair.decode is pair.prefill  # nothing moves
        self._count(work, 1)

    def granted(self, work: Work) -> None:
        """There is room for its KV."""
        self._count(work, -1)
        work.has_room = True
        self._count(work, 1)

    def began(self, work: Work) -> None:
        """Its first token."""
        self._count(work, -1)
        work.has_begun = True
        self._count(work, 1)

    def ended(self, work: Work) -> None:
        """It is over, whatever came of it."""
        self._count(work, -1)

    def _count(self, work: Work, times: int) -> None:
        # What was sent nowhere yet is ahead of everybody.
        prefill, decode = work.prefill, work.decode
        is_on_decode = decode is None or decode.incarnation in self._decodes.told
        if work.has_begun:
            self._num_answers += times * is_on_decode
        elif prefill is None or prefill.incarnation in self._prefills.told:
            self._num_prompts += times
            self._num_to_compute += times * max(0, work.num_tokens - work.num_cached)
        if is_on_decode and not work.has_room:
            self._num_roomless += times
            self._roomless_tokens += times * work.num_tokens

    @property
    def is_enough(self) -> bool:
        """Whether workers have prompts enough, answers as many as they run at once, or more than
        they have room for; or nobody can be asked."""
        sides = self._sides()
        if sides is not self._counted:
            self._count_anew(sides)
        if not sides:
            return True
        if not self._max_pending_tokens:
            return False
        return self._are_computing or self._are_answering or self._is_room_short(sides)

    @property
    def _are_computing(self) -> bool:
        side = self._prefills
        most = self._max_pending_tokens * side.share
        if side.share < side.num_workers:
            left = self._max_pending_tokens * side.num_workers - side.others_tokens
            most = max(most, min(left, self._most_yet))
        return self._num_prompts >= PROMPTS_AHEAD * side.share and self._num_to_compute >= most

    @property
    def _are_answering(self) -> bool:
        side = self._decodes
        return (
            not side.num_unknown
            and self._num_answers >= side.own_places
            and self._num_answers + side.others_answers >= side.num_places
        )

    def _is_room_short(self, sides: Sides) -> bool:
        if self._num_roomless < ANSWERS_AHEAD * self._decodes.share:
            return False
        needed = self._roomless_tokens // self._num_roomless
        return not any(
            worker.reserved_blocks + worker.blocks_for(needed) <= worker.num_blocks
            for worker in sides.decodes
        )
