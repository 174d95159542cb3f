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


@dataclass(slots=True)
class _Work:
    """One answer that the workers have. num_tokens: of its prompt. num_to_compute: of these, until
    it has begun. waits_for_room: decode has not promised it yet."""

    num_tokens: int
    num_to_compute: int
    has_begun: bool = False
    waits_for_room: bool = True


class WorkAhead:
    """All of it, by the requests' keys.

    max_pending_tokens: prompt tokens that each prefill worker has ahead, in the mean; 0 = there is
    never enough. sides: who can be asked at this moment.
    """

    def __init__(self, max_pending_tokens: int, sides: Callable[[], Sides]) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._sides = sides
        self._work: dict[bytes, _Work] = {}
        self._counted: Sides | None = None
        self._num_places = 0
        self._num_prompts = 0
        self._num_to_compute = 0
        self._num_answers = 0
        self._num_roomless = 0
        self._roomless_tokens = 0

    def admitted(self, key: bytes, num_tokens: int) -> None:
        """A prompt goes to a worker."""
        self._work[key] = _Work(num_tokens, num_tokens)
        self._num_prompts += 1
        self._num_to_compute += num_tokens
        self._num_roomless += 1
        self._roomless_tokens += num_tokens

    def dispatched(self, key: bytes, *, num_cached: int, is_apart: bool) -> None:
        """It has gone. num_cached: of its prompt need not be computed. is_apart: its KV moves to a
        decode worker."""
        work = self._work[key]
        if not work.has_begun:
            num_to_compute = max(0, work.num_tokens - num_cached)
            self._num_to_compute += num_to_compute - work.num_to_compute
            work.num_to_compute = num_to_compute
        if not is_apart:
            self.granted(key)

    def granted(self, key: bytes) -> None:
        """There is room for its KV, or it needs none."""
        work = self._work[key]
        if work.waits_for_room:
            work.waits_for_room = False
            self._num_roomless -= 1
            self._roomless_tokens -= work.num_tokens

    def began(self, key: bytes) -> None:
        """Its first token."""
        work = self._work[key]
        self._prompt_ended(work)
        work.has_begun = True
        self._num_answers += 1

    def ended(self, key: bytes) -> None:
        """It is over, whatever came of it."""
        self.granted(key)
        work = self._work.pop(key)
        if work.has_begun:
            self._num_answers -= 1
        else:
            self._prompt_ended(work)

    def _prompt_ended(self, work: _Work) -> None:
        self._num_prompts -= 1
        self._num_to_compute -= work.num_to_compute

    @property
    def is_enough(self) -> bool:
        """Whether workers have prompts enough, answers as many as they run at once, or more than
        they have room for."""
        if not self._max_pending_tokens:
            return False
        sides = self._sides()
        if sides is not self._counted or not self._num_places:  # another worker, or one has told
            self._counted = sides
            places = [worker.status.max_running for worker in sides.decodes]
            self._num_places = sum(places) if all(places) else 0
        if 0 < self._num_places <= self._num_answers:
            return True
        num = max(1, len(sides.prefills))
        are_computing = (
            self._num_prompts >= PROMPTS_AHEAD * num
            and self._num_to_compute >= self._max_pending_tokens * num
        )
        return are_computing or self._is_room_short(sides)

    def _is_room_short(self, sides: Sides) -> bool:
        if self._num_roomless < ANSWERS_AHEAD * max(1, len(sides.decodes)):
            return False
        needed = self._roomless_tokens // self._num_roomless
        return not any(
            worker.reserved_blocks + worker.blocks_for(needed) <= worker.num_blocks
            for worker in sides.decodes
        )
