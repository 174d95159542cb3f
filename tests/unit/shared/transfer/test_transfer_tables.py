"""The transition tables: complete, closed, and obeyed."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from shared.errors import LocalProtocolError, RemoteProtocolError
from shared.transfer.machine import (
    FROM_PEER,
    RECEIVER_TABLE,
    SENDER_TABLE,
    Machine,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
)

ENDS: list[Any] = [
    (SENDER_TABLE, SenderState, SenderEvent),
    (RECEIVER_TABLE, ReceiverState, ReceiverEvent),
]
PAIRS = [
    (table, state, event) for table, states, events in ENDS for state in states for event in events
]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS)
def test_every_pair_moves_or_raises(table: Any, state: Enum, event: Enum):
    """An event moves the state as the table says, or raises and changes nothing."""
    machine: Machine[Any, Any] = Machine(table, state)
    after = table[state].get(event)
    if after is None:
        wanted = RemoteProtocolError if event in FROM_PEER[type(event)] else LocalProtocolError
        with pytest.raises(wanted, match=event.value):
            machine.step(event)
        assert machine.state is state
    else:
        assert machine.step(event) is after
        assert machine.state is after


@pytest.mark.parametrize(("table", "states", "events"), ENDS)
def test_every_state_is_listed_and_can_be_reached(table: Any, states: Any, events: Any):
    """The table has a row for each state, and a path leads to it from the first one."""
    assert set(table) == set(states)
    reached, todo = set(), [next(iter(states))]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached.add(state)
            todo += table[state].values()
    assert reached == set(states)


@pytest.mark.parametrize(("table", "states", "events"), ENDS)
def test_every_state_leads_to_an_end(table: Any, states: Any, events: Any):
    """From everywhere there is a way out, and an end has none."""
    ends = {state for state in states if not table[state]}
    safe = set(ends)
    while more := {s for s in states if set(table[s].values()) & safe} - safe:
        safe |= more
    assert safe == set(states)
    assert {state.name for state in ends} in ({"DONE", "ABORTED", "LOST"}, {"DONE", "FREED"})


def test_giving_up_and_losing_the_peer_are_legal_in_every_live_state():
    """Cancel is one transition, valid wherever something may still happen."""
    for state, row in SENDER_TABLE.items():
        if row and state is not SenderState.NEW:
            assert SenderEvent.GAVE_UP in row
            assert state is SenderState.LOSING or SenderEvent.PEER_LOST in row
    for row in RECEIVER_TABLE.values():
        if row:
            assert {ReceiverEvent.GAVE_UP, ReceiverEvent.PEER_LOST} <= set(row)


def test_memory_in_use_can_only_end_drained():
    """DONE and FREED of decode, and the ends of prefill that have sent, follow from settling."""
    for state in (SenderState.FINISHING, SenderState.ABORTING, SenderState.LOSING):
        leaving = {e for e, to in SENDER_TABLE[state].items() if not SENDER_TABLE[to]}
        assert leaving == {SenderEvent.DRAINED}
    for state, row in RECEIVER_TABLE.items():
        leaving = {e for e, to in row.items() if to is ReceiverState.FREED}
        settling = state in (ReceiverState.ABORTING, ReceiverState.QUARANTINED)
        assert leaving == ({ReceiverEvent.DRAINED} if settling else set())
