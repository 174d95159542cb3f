"""The life of one prefill job as a table: queued -> computing -> pushing -> closed. Owns no blocks
and no clock.

Two things use a job's blocks, the running step and the push. The scheduler guards the first
(``release`` waits for ``commit``); this table guards the second: blocks are released only when the
push is settled, i.e. decode acknowledged everything or no send reads them any more (reliability I3,
fault 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shared.errors import LocalProtocolError, MeshError, TransferFailed


class JobState(Enum):
    """QUEUED and COMPUTING: token 1 is not sampled. PUSHING: it is, KV is not acknowledged.
    CLOSING: decided, but a send may still read the blocks. CLOSED: blocks released."""

    QUEUED = "queued"
    COMPUTING = "computing"
    PUSHING = "pushing"
    CLOSING = "closing"
    CLOSED = "closed"


class JobEvent(Enum):
    """What can happen to a job."""

    ADMITTED = "admitted"  # its first chunk is planned
    SAMPLED = "sampled"  # token 1, more follow on decode
    SAMPLED_LAST = "sampled_last"  # token 1 ends the answer: nothing needs to be moved
    PUSH_DONE = "push_done"  # decode acknowledged everything, all sends settled
    PUSH_FAILED = "push_failed"  # refused, aborted by decode, or the pair was lost
    PUSH_SETTLED = "push_settled"  # after a failure or an abort: no send reads the blocks any more
    FAILED = "failed"  # the scheduler or the deadline failed it
    CANCELLED = "cancelled"  # the gateway cancelled, or its session ended


class Outcome(Enum):
    """How a job ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StopCompute:
    """``Scheduler.abort`` the sequence."""


@dataclass(frozen=True, slots=True)
class AbortPush:
    """End the transfer early; report PUSH_SETTLED when no send reads the blocks. error: None =
    nothing was wrong."""

    error: MeshError | None


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """``Scheduler.release`` the sequence (it waits for the running step itself) and forget the
    job."""


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Tell the gateway PrefillDone."""


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the gateway PrefillFailed."""

    error: MeshError


Effect = StopCompute | AbortPush | ReleaseBlocks | ReportDone | ReportFailed


class _Move(NamedTuple):
    """Where an event leads. closes: the outcome it decides, if it decides one."""

    to: JobState
    outcome: Outcome | None = None


_S, _E = JobState, JobEvent
_FAIL, _CANCEL = _Move(_S.CLOSING, Outcome.FAILED), _Move(_S.CLOSING, Outcome.CANCELLED)

MOVES: dict[tuple[JobState, JobEvent], _Move] = {
    (_S.QUEUED, _E.ADMITTED): _Move(_S.COMPUTING),
    (_S.QUEUED, _E.PUSH_FAILED): _FAIL,
    (_S.QUEUED, _E.FAILED): _FAIL,
    (_S.QUEUED, _E.CANCELLED): _CANCEL,
    (_S.COMPUTING, _E.SAMPLED): _Move(_S.PUSHING),
    (_S.COMPUTING, _E.SAMPLED_LAST): _Move(_S.CLOSING, Outcome.DONE),
    (_S.COMPUTING, _E.PUSH_FAILED): _FAIL,
    (_S.COMPUTING, _E.FAILED): _FAIL,
    (_S.COMPUTING, _E.CANCELLED): _CANCEL,
    (_S.PUSHING, _E.PUSH_DONE): _Move(_S.CLOSED, Outcome.DONE),
    (_S.PUSHING, _E.PUSH_FAILED): _FAIL,
    (_S.PUSHING, _E.FAILED): _FAIL,
    (_S.PUSHING, _E.CANCELLED): _CANCEL,
    (_S.CLOSING, _E.PUSH_SETTLED): _Move(_S.CLOSED),
}
"""Every move there is. CLOSING without a push to settle goes on to CLOSED at once."""

IGNORED: frozenset[tuple[JobState, JobEvent]] = frozenset(
    (state, event)
    for state in (_S.CLOSING, _S.CLOSED)
    for event in (_E.PUSH_DONE, _E.PUSH_FAILED, _E.FAILED, _E.CANCELLED)
) | {(_S.CLOSED, _E.PUSH_SETTLED)}
"""Events that cross with a decision: they come too late and change nothing."""


class Job:
    """One job. has_push: whether a transfer exists (False: nowhere to push, one token asked
    for)."""

    def __init__(self, *, has_push: bool) -> None:
        self._state = JobState.QUEUED
        self._outcome: Outcome | None = None
        self._has_push = has_push

    @property
    def state(self) -> JobState:
        """Where it stands."""
        return self._state

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while that is open."""
        return self._outcome

    def handle(self, event: JobEvent, error: MeshError | None = None) -> list[Effect]:
        """Move by the table and return what to do, in order.

        error: why, for PUSH_FAILED, FAILED and CANCELLED. Events that come too late for a decided
        job are ignored; raises LocalProtocolError: the table has no such move.
        """
        if (self._state, event) in IGNORED:
            return []
        move = MOVES.get((self._state, event))
        if move is None or (event is JobEvent.SAMPLED and not self._has_push):
            raise LocalProtocolError(f"{event.value} is not allowed on a {self._state.value} job")
        before, self._state = self._state, move.to
        effects: list[Effect] = []
        if move.outcome is not None:
            self._outcome = move.outcome
            effects += self._decide(before, move, error)
        if self._state is JobState.CLOSING and not self._has_push:
            self._state = JobState.CLOSED
        if self._state is JobState.CLOSED:
            effects.append(ReleaseBlocks())
        return effects

    def _decide(self, before: JobState, move: _Move, error: MeshError | None) -> list[Effect]:
        """What a decided outcome asks for at once; the blocks may have to wait."""
        effects: list[Effect] = []
        if before in (JobState.QUEUED, JobState.COMPUTING) and move.outcome is not Outcome.DONE:
            effects.append(StopCompute())
        if move.to is JobState.CLOSING and self._has_push:
            effects.append(AbortPush(error))
        if move.outcome is Outcome.DONE:
            effects.append(ReportDone())
        elif move.outcome is Outcome.FAILED:
            effects.append(ReportFailed(error or TransferFailed("the push failed")))
        return effects

    def __repr__(self) -> str:
        return f"<Job {self._state.value}, outcome {self._outcome and self._outcome.value}>"
