"""What no table of moves tells, found by playing it: verdicts concluded from several facts.

How a worker stands with a gateway, and what silence says of a peer. The real cores are driven
through every event from every situation that can be reached, and what they did is written down:
the diagrams of docs/states.md are what the code does. Pure and exhaustive within the bounds below;
an event that the core refuses is no move.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.worker import Role, Standing, Worker, WorkerStatus
from shared.errors import LocalProtocolError, MeshError
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.liveness import Liveness, PeerState
from shared.model_spec import ModelSpec

Moves = dict[str, dict[str, list[str]]]
"""State -> event -> states after it, the same one included; in the order in which they were found.
A state that nothing leaves has no events."""

Situation = TypeVar("Situation")


class Event(NamedTuple):
    """An event by name. play: lets it happen to a copy; raises MeshError if it has no place."""

    name: str
    play: Callable[[Any], None]


def explore(
    start: Situation,
    events: tuple[Event, ...],
    *,
    state_of: Callable[[Situation], str],
    key_of: Callable[[Situation], str],
    states: list[str],
) -> Moves:
    """Play every event in every situation that can be reached from ``start``.

    key_of: equal for situations with the same future. states: all there are, in order.
    Raises LookupError: a state was never reached, so the events are not all.
    """
    moves: Moves = {state: {} for state in states}
    seen = {key_of(start)}
    reached = {state_of(start)}
    todo = [start]
    while todo:
        situation = todo.pop(0)
        before = state_of(situation)
        for event in events:
            after = copy.deepcopy(situation)
            try:
                event.play(after)
            except (MeshError, KeyError):
                continue
            reached.add(state_of(after))
            found = moves[before].setdefault(event.name, [])
            if state_of(after) not in found:
                found.append(state_of(after))
            if key_of(after) not in seen:
                seen.add(key_of(after))
                todo.append(after)
    if missing := [state for state in states if state not in reached]:
        raise LookupError(f"never reached: {', '.join(missing)}")
    return moves


# --- a worker, as a gateway sees it -------------------------------------------------------------

LEFT = "left"


class Member:
    """A worker in a gateway's table."""

    def __init__(self) -> None:
        model = ModelSpec(name="any", fingerprint=b"", vocab_size=1, max_model_len=1, dtype="")
        layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
        self.table = PeerTable()
        self.worker = Worker(
            role=Role.DECODE,
            incarnation=Incarnation(1),
            host="any",
            port=1,
            model=model,
            layout=layout,
            num_blocks=1,
            block_size=1,
        )
        self.table.join(self.worker)

    @property
    def state(self) -> str:
        """Its standing, or that it has left."""
        return self.worker.standing.value if len(self.table) else LEFT

    @property
    def key(self) -> str:
        """Two members with one key have one future."""
        worker = self.worker
        return f"{worker.is_connected} {worker.is_silent} {worker.status.is_draining} {self.state}"


def worker_moves() -> Moves:
    """A worker from its join to its end."""
    return explore(
        Member(),
        (
            Event("session up", lambda member: _told(member, True)),
            Event("session lost", lambda member: _told(member, False)),
            Event("silent", lambda member: _heard_of(member, True)),
            Event("heard", lambda member: _heard_of(member, False)),
            Event("reports that it drains", _drains),
            Event("registration ended", _leaves),
        ),
        state_of=lambda member: member.state,
        key_of=lambda member: member.key,
        states=[*(standing.value for standing in Standing), LEFT],
    )


def _told(member: Member, is_connected: bool) -> None:
    before, member.worker.is_connected = member.worker.is_connected, is_connected
    member.worker.is_silent = False
    if member.state == LEFT or is_connected is before:
        raise LocalProtocolError("it changed nothing")


def _heard_of(member: Member, is_silent: bool) -> None:
    before, member.worker.is_silent = member.worker.is_silent, is_silent
    if member.state == LEFT or not member.worker.is_connected or is_silent is before:
        raise LocalProtocolError("only a session that is up tells")


def _drains(member: Member) -> None:
    if not member.table.report(member.worker, WorkerStatus(is_draining=True)) or not member.table:
        raise LocalProtocolError("it drains already")


def _leaves(member: Member) -> None:
    if member.table.leave(member.worker.incarnation) is None:
        raise LocalProtocolError("it has left")


# --- a peer, judged by its silence --------------------------------------------------------------


class Watched:
    """A peer that says nothing, or something."""

    def __init__(self) -> None:
        self.watch = Liveness(0.0)
        self.now = 0.0

    @property
    def state(self) -> str:
        """The verdict at this instant."""
        return self.watch.state(self.now).value


def peer_moves() -> Moves:
    """A peer on any long-lived stream: what silence says about it."""
    rule = Liveness(0.0).rule
    return explore(
        Watched(),
        (
            Event(f"silent for {rule.suspect_after_s:g} s", _silent(PeerState.SUSPECT)),
            Event(f"silent for {rule.dead_after_s:g} s", _silent(PeerState.DEAD)),
            Event("heard", _heard),
        ),
        state_of=lambda peer: peer.state,
        key_of=lambda peer: peer.state,
        states=[state.value for state in PeerState],
    )


def _silent(until: PeerState) -> Callable[[Watched], None]:
    def play(peer: Watched) -> None:
        before = peer.state
        while peer.state == before != PeerState.DEAD.value:
            peer.now = peer.watch.next_check_at(peer.now)
        if peer.state != until.value or peer.state == before:
            raise LocalProtocolError("not the next verdict")

    return play


def _heard(peer: Watched) -> None:
    if peer.watch.state(peer.now) is PeerState.DEAD:
        raise LocalProtocolError("its stream is closed")
    peer.watch.heard(peer.now)
