"""Admission: accept now, wait a bounded while, or refuse at once with a hint when to come back.

Pure: arrivals and departures in, decisions out; ``now`` is an argument. It knows counts and times,
not workers. The bound on requests inside the gateway is what keeps every later queue, buffer and
map bounded as well.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from shared.errors import DeadlinePassed, MeshError, Overloaded


class Admitted(Enum):
    """What became of an arrival."""

    NOW = "now"
    QUEUED = "queued"


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counts at one moment."""

    num_running: int
    num_waiting: int
    num_refused: int


class Admission:
    """A counter of running requests with a bounded first-come-first-served waiting room.

    Keys are any hashable that names a request; each is admitted at most once.
    """

    def __init__(self, *, max_running: int, max_waiting: int, max_wait_s: float) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._running: set[bytes] = set()
        self._waiting: OrderedDict[bytes, tuple[float, float | None]] = OrderedDict()
        self._num_refused = 0

    def arrive(self, key: bytes, now: float, deadline_at: float | None) -> Admitted:
        """Admit or queue a request.

        Raises Overloaded: the waiting room is full. Raises DeadlinePassed: too late already.
        """
        if deadline_at is not None and now >= deadline_at:
            raise DeadlinePassed("the deadline passed before the request was admitted")
        if len(self._running) < self._max_running and not self._waiting:
            self._running.add(key)
            return Admitted.NOW
        if len(self._waiting) >= self._max_waiting:
            self._num_refused += 1
            raise Overloaded(
                f"{len(self._running)} requests run and {len(self._waiting)} wait: try again soon",
                code="queue_full",
                retry_after_s=max(1.0, self._max_wait_s),
            )
        self._waiting[key] = (now + self._max_wait_s, deadline_at)
        return Admitted.QUEUED

    def leave(self, key: bytes) -> list[bytes]:
        """Forget a request, running or waiting; return those that may run now, oldest first."""
        self._waiting.pop(key, None)
        self._running.discard(key)
        admitted: list[bytes] = []
        while self._waiting and len(self._running) < self._max_running:
            next_key, _ = self._waiting.popitem(last=False)
            self._running.add(next_key)
            admitted.append(next_key)
        return admitted

    def give_up_at(self, key: bytes) -> float | None:
        """Return when a waiting request must be refused; None if it does not wait."""
        entry = self._waiting.get(key)
        if entry is None:
            return None
        expires_at, deadline_at = entry
        return expires_at if deadline_at is None else min(expires_at, deadline_at)

    def expire(self, key: bytes, now: float) -> MeshError | None:
        """Remove a request that has waited too long and return its error; None if it does not
        wait."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return None
        _, deadline_at = entry
        self._num_refused += 1
        if deadline_at is not None and now >= deadline_at:
            return DeadlinePassed("the deadline passed in the queue")
        return Overloaded(
            f"no place came free within {self._max_wait_s:g} s",
            code="queue_timeout",
            retry_after_s=max(1.0, self._max_wait_s),
        )

    def statistics(self) -> AdmissionStatistics:
        """Return the counts."""
        return AdmissionStatistics(len(self._running), len(self._waiting), self._num_refused)
