"""State machines that are code and not a table, found by playing them.

The gateway's life cycle and decode's leases keep their state beside counters and blocks, so no
table tells all. Here the real cores are driven through every event from every situation that can be
reached, and what they did is written down: the diagrams of docs/states.md are what the code does.
Pure and exhaustive within the bounds below; an event that the core refuses is no move.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from services.gateway.core.lifecycle import Leg, Lifecycle, State
from shared.errors import DeadlinePassed, InvalidRequest, LocalProtocolError, MeshError, WorkerLost
from shared.ids import Incarnation, LeaseToken, RequestId
from shared.kv.pool import BlockPool
from shared.liveness import Liveness, PeerState
from shared.request import AnswerToken, FinishReason, SamplingParams, WorkItem
from shared.transfer.messages import TransferKey
from shared.worker.core.lease import LeasePolicy, LeaseState
from shared.worker.core.leases import Leases

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


# --- the gateway's life cycle -------------------------------------------------------------------

MAX_TOKENS = 3
MAX_ATTEMPTS = 2


def request_moves() -> Moves:
    """One request at the gateway: an answer of up to three tokens, two attempts."""
    start = Lifecycle((1, 2), SamplingParams(max_tokens=MAX_TOKENS), max_attempts=MAX_ATTEMPTS)
    return explore(
        start,
        _REQUEST_EVENTS,
        state_of=lambda request: request.state.value,
        # The counter of late tokens decides nothing, and has no bound.
        key_of=lambda request: repr({**vars(request), "num_dropped": 0}),
        states=[state.value for state in State],
    )


def _tokens(leg: Leg, finish: FinishReason) -> Callable[[Lifecycle], None]:
    def play(request: Lifecycle) -> None:
        position = request.num_output_tokens
        if position >= MAX_TOKENS:
            raise LocalProtocolError("the answer is over")
        token = AnswerToken(position, 7, finish)
        if request.token_arrived(_attempt(request), leg, token) == [] and not _holds(request):
            raise LocalProtocolError("dropped")

    return play


def _holds(request: Lifecycle) -> bool:
    return request.state is State.RUNNING


def _attempt(request: Lifecycle) -> int:
    return request.num_attempts - 1


def _leg_failed(leg: Leg, error: MeshError) -> Callable[[Lifecycle], None]:
    def play(request: Lifecycle) -> None:
        effects = request.leg_failed(_attempt(request), leg, error, lost=True)
        if not effects and request.state is not State.RUNNING:
            raise LocalProtocolError("nobody is there to hear it")

    return play


def _ended(act: Callable[[Lifecycle], Any]) -> Callable[[Lifecycle], None]:
    def play(request: Lifecycle) -> None:
        if act(request) == []:
            raise LocalProtocolError("it is over")

    return play


_GONE = WorkerLost("gone")
_WRONG = InvalidRequest("wrong")
_LATE = DeadlinePassed("late")

_REQUEST_EVENTS = (
    Event("dispatched", lambda request: request.dispatched()),
    Event("granted", _ended(lambda r: r.granted(_attempt(r)) or _holds(r) or [])),
    Event("token", _tokens(Leg.PREFILL, FinishReason.NONE)),
    Event("token", _tokens(Leg.DECODE, FinishReason.NONE)),
    Event("last token", _tokens(Leg.PREFILL, FinishReason.STOP)),
    Event("last token", _tokens(Leg.DECODE, FinishReason.STOP)),
    Event("worker lost", _leg_failed(Leg.PREFILL, _GONE)),
    Event("worker lost", _leg_failed(Leg.DECODE, _GONE)),
    Event("request refused for good", _leg_failed(Leg.PREFILL, _WRONG)),
    Event("deadline or no pair", _ended(lambda request: request.fail(_LATE))),
    Event("client left", _ended(lambda request: request.cancel())),
)


# --- decode's leases ----------------------------------------------------------------------------

_PREFILL = Incarnation(1)
_OPEN_WAIT_S, _ROOM_WAIT_S = 5.0, 2.0


class LeaseRoom:
    """One lease under observation, and another request that may hold the pool's only blocks."""

    def __init__(self) -> None:
        self.pool = BlockPool(2, 4, model_key=b"states", cache_prefixes=False)
        self.leases = Leases(self.pool, LeasePolicy(open_wait_s=_OPEN_WAIT_S))
        self.now = 0.0
        item = WorkItem(
            token_ids=(1, 2, 3, 4, 5), num_prompt_tokens=5, sampling=SamplingParams(max_tokens=2)
        )
        self.other, _ = self.leases.reserve(_key(1), item, _PREFILL, now=0.0, wait_s=_ROOM_WAIT_S)
        self.ours, _ = self.leases.reserve(_key(2), item, _PREFILL, now=0.0, wait_s=_ROOM_WAIT_S)

    @property
    def state(self) -> str:
        """The observed lease's."""
        return self.ours.state.value

    @property
    def key(self) -> str:
        """Two rooms with one key have one future."""
        return f"{self.state} {self.other.state.value} {self.now} {self.ours.expires_at}"


def _key(number: int) -> TransferKey:
    return TransferKey(RequestId(bytes([number] * 16)), 0, LeaseToken(bytes(16)))


def lease_moves() -> Moves:
    """One reservation on a decode worker whose room is taken at first."""
    return explore(
        LeaseRoom(),
        _LEASE_EVENTS,
        state_of=lambda room: room.state,
        key_of=lambda room: room.key,
        states=[state.value for state in LeaseState],
    )


def _room_comes_free(room: LeaseRoom) -> None:
    if room.other.state is not LeaseState.GRANTED:
        raise LocalProtocolError("the room is free")
    room.leases.release(room.other, now=room.now)


def _open(room: LeaseRoom) -> None:
    if not room.leases.open(room.ours, _PREFILL):
        raise LocalProtocolError("it waits")


def _unless_over(act: Callable[[LeaseRoom], Any]) -> Callable[[LeaseRoom], None]:
    def play(room: LeaseRoom) -> None:
        if room.ours.state in (LeaseState.JOINED, LeaseState.RELEASED):
            raise LocalProtocolError("it is over")
        before = room.state
        act(room)
        if room.state == before:
            raise LocalProtocolError("it changed nothing")

    return play


def _settled(room: LeaseRoom) -> None:
    if room.ours.state is LeaseState.QUARANTINED:
        room.leases.end_quarantine(room.ours, now=room.now)
    elif room.ours.state in (LeaseState.OPEN, LeaseState.ABORTING):
        room.leases.release(room.ours, now=room.now)


def _wait_over(room: LeaseRoom) -> None:
    room.now += max(_OPEN_WAIT_S, _ROOM_WAIT_S)
    # The other one has its transfer: nothing expires but the lease that is looked at.
    if room.other.state is LeaseState.GRANTED:
        room.leases.open(room.other, _PREFILL)
    room.leases.tick(now=room.now)


_LEASE_EVENTS = (
    Event("room comes free", _unless_over(_room_comes_free)),
    Event("opened by prefill", _unless_over(_open)),
    Event("all frames placed", _unless_over(lambda room: room.leases.join(room.ours, 7))),
    Event("cancelled", _unless_over(lambda r: r.leases.cancel(r.ours, _GONE, now=r.now))),
    Event(
        "receives still settle", _unless_over(lambda room: room.leases.begin_quarantine(room.ours))
    ),
    Event("nothing can write any more", _unless_over(_settled)),
    Event("prefill lost", _unless_over(lambda r: r.leases.lose_source(_PREFILL, _GONE, now=r.now))),
    Event("wait over", _unless_over(_wait_over)),
)


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
