"""The life of one request on a worker as a table, whatever the worker does for it. Owns no blocks
and no clock.

    prompt   queued -> computing -> pushing -> closed     computed here, decoded elsewhere
    answer   receiving -> running -> closed               computed elsewhere, decoded here
    whole    queued -> computing -> running -> closed     both here
    prefix   receiving -> closed                          computed elsewhere, cached here

Two things use a request's blocks: a step and a transfer. The scheduler guards the first (it gives
blocks back only when no step has them); this table guards the second: what is decided is *closing*
until the transfer is settled, i.e. nothing reads or writes the blocks any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shared.errors import LeaseLost, LocalProtocolError, MeshError


class Task(StrEnum):
    """What a worker does for a request; see the drawing above."""

    PROMPT = "prompt"
    ANSWER = "answer"
    WHOLE = "whole"
    PREFIX = "prefix"


class LifeState(StrEnum):
    """QUEUED, COMPUTING: its prompt waits, or runs. RECEIVING: room is waited for, then KV (how far
    that is, the lease knows). RUNNING: one token a step. PUSHING: token 1 is sampled, KV is not
    acknowledged. CLOSING: decided, but a transfer may still touch the blocks. CLOSED: holds
    nothing."""

    QUEUED = "queued"
    COMPUTING = "computing"
    RECEIVING = "receiving"
    RUNNING = "running"
    PUSHING = "pushing"
    CLOSING = "closing"
    CLOSED = "closed"


class LifeEvent(StrEnum):
    """What can happen to a request."""

    ADMITTED = "admitted"  # the first chunk of its prompt is planned
    SAMPLED = "sampled"  # token 1, the next ones follow elsewhere: its KV is still being pushed
    BEGUN = "begun"  # from the next step on it decodes here: token 1 is sampled, or its KV is here
    ENDED = "ended"  # its last token is sampled: nothing needs to be moved any more
    KEPT = "kept"  # a prefix is in the cache, and its blocks are given back
    PUSHED = "pushed"  # the other worker acknowledged everything, all sends are settled
    FAILED = "failed"  # by the scheduler, the transfer, the lease or the deadline
    CANCELLED = "cancelled"  # the gateway cancelled it, or its session ended
    SETTLED = "settled"  # no transfer touches the blocks any more


class LifeOutcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StopCompute:
    """``Scheduler.abort`` the sequence."""


@dataclass(frozen=True, slots=True)
class AbortPush:
    """End the transfer early; report SETTLED when no send reads the blocks. error: None = nothing
    was wrong."""

    error: MeshError | None


@dataclass(frozen=True, slots=True)
class CancelLease:
    """Give the reservation up; report SETTLED when no receive can write its blocks."""

    error: MeshError


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Tell the gateway that the prompt's KV is where it belongs, or not needed."""


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the gateway why; the request's last word."""

    error: MeshError


@dataclass(frozen=True, slots=True)
class Close:
    """Forget the request, and have the scheduler give back what it holds."""


Effect = StopCompute | AbortPush | CancelLease | ReportDone | ReportFailed | Close


class Move(NamedTuple):
    """Where an event leads. outcome: what it decides, if anything."""

    to: LifeState
    outcome: LifeOutcome | None = None


_S, _E = LifeState, LifeEvent
_LIVE = (_S.QUEUED, _S.COMPUTING, _S.RECEIVING, _S.RUNNING, _S.PUSHING)

MOVES: dict[tuple[LifeState, LifeEvent], Move] = {
    (_S.QUEUED, _E.ADMITTED): Move(_S.COMPUTING),
    (_S.COMPUTING, _E.SAMPLED): Move(_S.PUSHING),
    (_S.COMPUTING, _E.BEGUN): Move(_S.RUNNING),
    (_S.COMPUTING, _E.ENDED): Move(_S.CLOSING, LifeOutcome.DONE),
    (_S.RECEIVING, _E.BEGUN): Move(_S.RUNNING),
    (_S.RECEIVING, _E.KEPT): Move(_S.CLOSED, LifeOutcome.DONE),
    # A clean end of the transfer: nothing has to be decoded here.
    (_S.RECEIVING, _E.SETTLED): Move(_S.CLOSED, LifeOutcome.CANCELLED),
    (_S.RUNNING, _E.ENDED): Move(_S.CLOSING, LifeOutcome.DONE),
    (_S.PUSHING, _E.PUSHED): Move(_S.CLOSED, LifeOutcome.DONE),
    **{(state, _E.FAILED): Move(_S.CLOSING, LifeOutcome.FAILED) for state in _LIVE},
    **{(state, _E.CANCELLED): Move(_S.CLOSING, LifeOutcome.CANCELLED) for state in _LIVE},
    (_S.CLOSING, _E.SETTLED): Move(_S.CLOSED),
}
"""Every move there is. CLOSING without a transfer to settle goes on to CLOSED at once."""

IGNORED: frozenset[tuple[LifeState, LifeEvent]] = frozenset(
    (state, event)
    for state in (_S.CLOSING, _S.CLOSED)
    for event in (_E.BEGUN, _E.KEPT, _E.PUSHED, _E.FAILED, _E.CANCELLED)
) | {(_S.CLOSED, _E.SETTLED)}
"""Events that cross with a decision: they come too late and change nothing. What steps tell
(ADMITTED, SAMPLED, ENDED) is not among them: of a sequence that was aborted the scheduler says
nothing more."""


class Life:
    """One request. has_push: its KV goes to another worker (False: nowhere, as one token was asked
    for, or only to a later step here)."""

    def __init__(self, task: Task, *, has_push: bool = False) -> None:
        self.task = task
        receives = task in (Task.ANSWER, Task.PREFIX)
        self.state = LifeState.RECEIVING if receives else LifeState.QUEUED
        self.outcome: LifeOutcome | None = None
        """How it ended; None while that is open."""
        self._has_push = has_push

    @property
    def is_prompt(self) -> bool:
        """Whether it counts as a prompt that a worker holds: for another worker until it is closed,
        of a whole request until it is computed."""
        if self.task is Task.PROMPT:
            return self.state is not LifeState.CLOSED
        return self.state in (LifeState.QUEUED, LifeState.COMPUTING)

    def handle(self, event: LifeEvent, error: MeshError | None = None) -> list[Effect]:
        """Move by the table and return what to do, in order.

        error: why, for FAILED and CANCELLED. Events that come too late for a decided request are
        ignored; raises LocalProtocolError: the table has no such move.
        """
        before = self.state
        if (before, event) in IGNORED:
            return []
        move = MOVES.get((before, event))
        if move is None or (event is LifeEvent.SAMPLED and not self._has_push):
            raise LocalProtocolError(f"{event.value} is not allowed on a {before.value} request")
        self.state = move.to
        effects: list[Effect] = []
        if move.outcome is not None:
            self.outcome = move.outcome
            effects += self._decide(before, move, error)
            has_transfer = self._has_push or before is LifeState.RECEIVING
            if self.state is LifeState.CLOSING and not has_transfer:
                self.state = LifeState.CLOSED
        if self.state is LifeState.CLOSED:
            effects.append(Close())
        return effects

    def _decide(self, before: LifeState, move: Move, error: MeshError | None) -> list[Effect]:
        """What a decided outcome asks for at once: words first, for what stops may close."""
        effects: list[Effect] = []
        if move.outcome is LifeOutcome.FAILED:
            assert error is not None
            effects.append(ReportFailed(error))
        elif move.outcome is LifeOutcome.DONE and self.task is Task.PROMPT:
            effects.append(ReportDone())
        computes = before in (LifeState.QUEUED, LifeState.COMPUTING, LifeState.RUNNING)
        if computes and move.outcome is not LifeOutcome.DONE:
            effects.append(StopCompute())
        if before is LifeState.RECEIVING and move.to is LifeState.CLOSING:
            effects.append(CancelLease(error or LeaseLost("cancelled", code="cancelled")))
        if self._has_push and move.to is LifeState.CLOSING:
            effects.append(AbortPush(error))
        return effects
