"""Who gets the next staging slot: of the transfers that wait for one, that whose link has the
fewest; of several the one that has waited longest. A link that is slow, and keeps each slot for
long, would else come to have nearly all.

Each link's transfers stand in a line of their own, so that the choice takes no longer where more of
them wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Generic, Protocol, TypeVar

from shared.transfer.flow import Flow
from shared.transfer.messages import TransferKey


class Waiting(Protocol):
    """A transfer, of either end."""

    key: TransferKey
    flow: Flow


Transfer = TypeVar("Transfer", bound=Waiting)


class SlotQueue(Generic[Transfer]):
    """may_have_slot: the others keep their places. In one line either all may, or who may not has a
    slot already; there are ``num_slots``."""

    def __init__(self, num_slots: int, may_have_slot: Callable[[Transfer], bool]) -> None:
        self._most_passed_over = num_slots
        self._may_have_slot = may_have_slot
        self._lines: dict[Hashable, dict[TransferKey, Transfer]] = {}
        self._places: dict[TransferKey, tuple[Hashable, int]] = {}
        self._num_wishes = 0

    def add(self, line: Hashable, transfer: Transfer) -> None:
        """It wants a slot. line: of its link. Who waits already keeps the place it has, or goes to
        the end of another line."""
        place = self._places.get(transfer.key)
        if place is not None and place[0] == line:
            return
        self.discard(transfer.key)
        self._num_wishes += 1
        self._places[transfer.key] = line, self._num_wishes
        # Ordered: a dict's front gets slow to find when it is taken again and again.
        self._lines.setdefault(line, OrderedDict())[transfer.key] = transfer

    def discard(self, key: TransferKey) -> None:
        """It wants none any more."""
        line, _ = self._places.pop(key, (None, 0))
        if (waiting := self._lines.get(line)) is not None:
            del waiting[key]
            if not waiting:
                del self._lines[line]

    def take(self) -> Transfer | None:
        """Return who is next, who waits no longer; None = nobody that may have a slot."""
        ready = filter(None, map(self._first_ready, self._lines.values()))
        next_ = min(ready, key=self._rank, default=None)
        if next_ is not None:
            self.discard(next_.key)
        return next_

    def _first_ready(self, waiting: Mapping[TransferKey, Transfer]) -> Transfer | None:
        # Behind so many that may not, as they have all slots, stands one that may.
        first = islice(waiting.values(), self._most_passed_over + 1)
        return next(filter(self._may_have_slot, first), None)

    def _rank(self, transfer: Transfer) -> tuple[int, int]:
        return transfer.flow.num_in_flight, self._places[transfer.key][1]
