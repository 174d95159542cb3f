"""The two ends of a transfer as tables: first the states and what may happen, then the code that
only reads them.

A transfer moves the KV of one attempt of one request from the source (the sender) to the sink (the
receiver). Two laws:

1. Every (state, event) either moves by its table or raises: RemoteProtocolError if the event came
   from the peer, LocalProtocolError if our own code caused it. Nothing moves in any other way.
2. A transfer is over only when nothing can touch its memory any more. That is why both ends have
   states *after* the decision to end (ABORTING, FINISHING, QUARANTINED...): an operation that was
   cancelled may still write.

Entries that stay in their state are events that are legal but late: they crossed something else on
the way. ``tools/generate_docs.py`` renders these tables, with their diagrams, into
docs/protocol.md. The shape is h11's (``h11/_state.py``): a protocol is data. This module knows no
frame, no slot and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

from shared.errors import LocalProtocolError, RemoteProtocolError


class SenderState(StrEnum):
    """The source's end."""

    NEW = "new"
    OPENING = "opening"  # asked for room; the source already computes
    PUSHING = "pushing"  # granted: spans are announced, frames flow as credit and layers allow
    COMMITTING = "committing"  # commit is sent; the last frames flow
    FINISHING = "finishing"  # the sink has everything; our last sends settle
    WITHDRAWING = "withdrawing"  # given up before the grant: if it comes, it is handed back
    ABORTING = "aborting"  # given up: nothing new is sent, what was sent lands or fails
    LOSING = "losing"  # the peer is gone: our sends settle as its endpoint closes
    DONE = "done"
    ABORTED = "aborted"
    LOST = "lost"


class SenderEvent(StrEnum):
    """What may happen to the source's end."""

    OPENED = "opened"
    GRANTED = "granted"
    REFUSED = "refused"
    SPAN_PLANNED = "span_planned"
    LAYERS_READY = "layers_ready"
    COMMITTED = "committed"
    CREDIT_RAISED = "credit_raised"
    SEND_SETTLED = "send_settled"
    ACKED = "acked"
    DONE_ACKED = "done_acked"
    GAVE_UP = "gave_up"  # cancel, a failed send, a stall, or a peer that broke the rules
    PEER_ABORTED = "peer_aborted"
    PEER_LOST = "peer_lost"
    DRAINED = "drained"  # the last of our sends has settled


class ReceiverState(StrEnum):
    """The sink's end. Blocks and slots are fenced from RESERVED until DONE or FREED."""

    RESERVED = "reserved"  # granted; nothing announced
    RECEIVING = "receiving"
    COMMITTED = "committed"  # everything is announced; waiting for the last frames
    ABORTING = "aborting"  # given up: what the peer has sent lands, other receives are cancelled
    QUARANTINED = "quarantined"  # that took too long: the endpoint is being closed
    DONE = "done"  # all verified and placed: the sequence owns the blocks
    FREED = "freed"  # given up, and nothing can write any more


class ReceiverEvent(StrEnum):
    """What may happen to the sink's end."""

    SPAN_ANNOUNCED = "span_announced"
    COMMITTED = "committed"
    FRAME_POSTED = "frame_posted"
    FRAME_ARRIVED = "frame_arrived"
    FRAME_LOST = "frame_lost"  # a receive settled without its message
    FRAME_PLACED = "frame_placed"
    FRAME_DROPPED = (
        "frame_dropped"  # verifying ended without placing: damaged, or not wanted any more
    )
    ALL_PLACED = "all_placed"
    GAVE_UP = "gave_up"  # cancel, a damaged or lost frame, a stall, or a peer that broke the rules
    PEER_ABORTED = "peer_aborted"
    PEER_LOST = "peer_lost"
    SETTLING_EXPIRED = "settling_expired"
    DRAINED = "drained"  # no receive is posted and no frame is being placed


State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Table = Mapping[State, Mapping[Event, State]]

_S, _SE = SenderState, SenderEvent


def _stay(state: State, *events: Event) -> dict[Event, State]:
    """Entries of events that are legal here and change nothing."""
    return dict.fromkeys(events, state)


_SENDER_ENDS: dict[SenderEvent, SenderState] = {
    _SE.GAVE_UP: _S.ABORTING,
    _SE.PEER_ABORTED: _S.ABORTING,
    _SE.PEER_LOST: _S.LOSING,
}
_STEP_LOOP = (_SE.SPAN_PLANNED, _SE.LAYERS_READY)
_FLOW = (_SE.GRANTED, _SE.LAYERS_READY, _SE.CREDIT_RAISED, _SE.SEND_SETTLED, _SE.ACKED)

SENDER_TABLE: Table[SenderState, SenderEvent] = MappingProxyType(
    {
        _S.NEW: {_SE.OPENED: _S.OPENING},
        _S.OPENING: {
            _SE.GRANTED: _S.PUSHING,
            _SE.REFUSED: _S.ABORTED,
            **_stay(_S.OPENING, *_STEP_LOOP),
            _SE.COMMITTED: _S.OPENING,  # remembered: it goes out right after the grant
            _SE.GAVE_UP: _S.WITHDRAWING,
            _SE.PEER_LOST: _S.LOSING,
        },
        _S.PUSHING: {
            **_stay(_S.PUSHING, _SE.SPAN_PLANNED, *_FLOW),
            _SE.COMMITTED: _S.COMMITTING,
            **_SENDER_ENDS,
        },
        _S.COMMITTING: {
            **_stay(_S.COMMITTING, *_FLOW),
            _SE.DONE_ACKED: _S.FINISHING,
            **_SENDER_ENDS,
        },
        _S.FINISHING: {
            **_stay(_S.FINISHING, *_FLOW, _SE.DONE_ACKED),
            _SE.GAVE_UP: _S.FINISHING,  # too late: the sink owns the sequence
            _SE.PEER_LOST: _S.FINISHING,
            _SE.DRAINED: _S.DONE,
        },
        _S.WITHDRAWING: {
            _SE.GRANTED: _S.ABORTED,
            _SE.REFUSED: _S.ABORTED,
            **_stay(_S.WITHDRAWING, *_STEP_LOOP, _SE.COMMITTED, _SE.GAVE_UP),
            _SE.PEER_LOST: _S.LOST,
        },
        _S.ABORTING: {
            **_stay(_S.ABORTING, _SE.SPAN_PLANNED, *_FLOW, _SE.COMMITTED, _SE.DONE_ACKED),
            **_stay(_S.ABORTING, _SE.GAVE_UP, _SE.PEER_ABORTED),
            _SE.PEER_LOST: _S.LOSING,
            _SE.DRAINED: _S.ABORTED,
        },
        _S.LOSING: {
            **_stay(_S.LOSING, *_STEP_LOOP, _SE.COMMITTED, _SE.SEND_SETTLED, _SE.GAVE_UP),
            _SE.DRAINED: _S.LOST,
        },
        _S.DONE: {},
        _S.ABORTED: {},
        _S.LOST: {},
    }
)

_R, _RE = ReceiverState, ReceiverEvent

_RECEIVER_ENDS: dict[ReceiverEvent, ReceiverState] = {
    _RE.GAVE_UP: _R.ABORTING,
    _RE.PEER_ABORTED: _R.ABORTING,
    _RE.PEER_LOST: _R.ABORTING,
}
_ARRIVALS = (_RE.SPAN_ANNOUNCED, _RE.FRAME_POSTED, _RE.FRAME_ARRIVED, _RE.FRAME_PLACED)
_SETTLING = (
    *(_RE.SPAN_ANNOUNCED, _RE.COMMITTED, _RE.FRAME_ARRIVED, _RE.FRAME_LOST, _RE.FRAME_PLACED),
    *(_RE.FRAME_DROPPED, _RE.GAVE_UP, _RE.PEER_ABORTED, _RE.PEER_LOST),
)

RECEIVER_TABLE: Table[ReceiverState, ReceiverEvent] = MappingProxyType(
    {
        _R.RESERVED: {_RE.SPAN_ANNOUNCED: _R.RECEIVING, **_RECEIVER_ENDS},
        _R.RECEIVING: {
            **_stay(_R.RECEIVING, *_ARRIVALS),
            _RE.COMMITTED: _R.COMMITTED,
            **_RECEIVER_ENDS,
        },
        _R.COMMITTED: {
            # A span that is repeated; a new one breaks the rules.
            **_stay(_R.COMMITTED, *_ARRIVALS, _RE.COMMITTED),
            _RE.ALL_PLACED: _R.DONE,
            **_RECEIVER_ENDS,
        },
        _R.ABORTING: {
            **_stay(_R.ABORTING, *_SETTLING),
            _RE.SETTLING_EXPIRED: _R.QUARANTINED,
            _RE.DRAINED: _R.FREED,
        },
        _R.QUARANTINED: {
            **_stay(_R.QUARANTINED, *_SETTLING),
            _RE.SETTLING_EXPIRED: _R.QUARANTINED,
            _RE.DRAINED: _R.FREED,
        },
        _R.DONE: {},
        _R.FREED: {},
    }
)

FROM_PEER: Mapping[type[StrEnum], frozenset[StrEnum]] = {
    _SE: frozenset(
        {_SE.GRANTED, _SE.REFUSED, _SE.CREDIT_RAISED, _SE.ACKED, _SE.DONE_ACKED, _SE.PEER_ABORTED}
    ),
    _RE: frozenset({_RE.SPAN_ANNOUNCED, _RE.COMMITTED, _RE.PEER_ABORTED}),
}
"""Events that a peer's message causes: where the table has no entry, the peer broke the rules."""


class Machine(Generic[State, Event]):
    """A state that moves by its table and in no other way."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table[State, Event], state: State) -> None:
        self._table = table
        self.state = state

    def step(self, event: Event) -> State:
        """Move and return the new state.

        Raises RemoteProtocolError or LocalProtocolError: this event has no place in this state;
        nothing changed.
        """
        after = self._table[self.state].get(event)
        if after is None:
            text = f"{event.value} in state {self.state.value}"
            if event in FROM_PEER[type(event)]:
                raise RemoteProtocolError(f"the peer broke the transfer protocol: {text}")
            raise LocalProtocolError(f"not allowed: {text}")
        self.state = after
        return after

    @property
    def is_over(self) -> bool:
        """Whether nothing can happen any more."""
        return not self._table[self.state]
