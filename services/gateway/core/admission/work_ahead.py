"""What the workers have of this gateway's requests: enough that none of them waits for work, and
not much more, since only what waits in the gateway is still in a fair order.

Their own queues are first come, first served: a prompt of a high priority, or of a tenant that asks
for little, would stand behind everything that was sent before; and one for which decode has no room
would keep its KV on prefill meanwhile. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.core.routing.sides import Sides

PROMPTS_AHEAD = 4
"""So many prompts a prefill worker may always have: one that it computes, and others on their
way."""

ANSWERS_AHEAD = 2
"""So many answers may wait for room on a decode worker: it is taken as soon as it comes free."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one answer asks of the workers. num_tokens: of its prompt. num_cached: of these need not
    be computed. has_begun: its first token is there. has_room: decode has promised it room for its
    KV, or it needs none. Changed by ``WorkAhead`` alone while it counts it."""

    num_tokens: int
    num_cached: int = 0
    has_begun: bool = False
    has_room: bool = False


class WorkAhead:
    """The sum of all that they have.

    max_pending_tokens: prompt tokens that each prefill worker has ahead, in the mean; 0 = as many
    as come. sides: who can be asked at this moment.
    """

    def __init__(self, max_pending_tokens: int, sides: Callable[[], Sides]) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._sides = sides
        self._counted: Sides | None = None
        self._num_places = 0
        self._num_prompts = 0
        self._num_to_compute = 0
        self._num_answers = 0
        self._num_roomless = 0
        self._roomless_tokens = 0

    def admitted(self, work: Work) -> None:
        """A prompt goes to a worker."""
        self._count(work, 1)

    def sent(self, work: Work, *, num_cached: int, is_apart: bool) -> None:
        """It has gone, perhaps once more. is_apart: its KV moves to a decode worker."""
        self._count(work, -1)
        work.num_cached, work.has_room = num_cached, not is_apart
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
        if work.has_begun:
            self._num_answers += times
        else:
            self._num_prompts += times
            self._num_to_compute += times * max(0, work.num_tokens - work.num_cached)
        if not work.has_room:
            self._num_roomless += times
            self._roomless_tokens += times * work.num_tokens

    @property
    def is_enough(self) -> bool:
        """Whether workers have prompts enough, answers as many as they run at once, or more than
        they have room for; or nobody can be asked."""
        sides = self._sides()
        if not sides:
            return True
        if not self._max_pending_tokens:
            return False
        if sides is not self._counted or not self._num_places:  # another worker, or one has told
            self._counted = sides
            places = [worker.status.max_running for worker in sides.decodes]
            self._num_places = sum(places) if all(places) else 0
        if 0 < self._num_places <= self._num_answers:
            return True
        num = len(sides.prefills)
        are_computing = (
            self._num_prompts >= PROMPTS_AHEAD * num
            and self._num_to_compute >= self._max_pending_tokens * num
        )
        return are_computing or self._is_room_short(sides)

    def _is_room_short(self, sides: Sides) -> bool:
        if self._num_roomless < ANSWERS_AHEAD * len(sides.decodes):
            return False
        needed = self._roomless_tokens // self._num_roomless
        return not any(
            worker.reserved_blocks + worker.blocks_for(needed) <= worker.num_blocks
            for worker in sides.decodes
        )
