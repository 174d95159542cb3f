"""Which pairs a worker makes, answers, keeps and lets go. Pure.

Any two workers share one pair, over which either may push to the other. Three rules:

- *Standing* partners (a gateway lists them) are dialled at once, and again whenever the pair is
  lost. With everybody else a pair is made when a gateway asks for it, and kept warm after that.
- Either end may dial. When both do at once, the dial of the worker with the smaller incarnation
  counts: both know both numbers. Who has a pair, or is about to have one, refuses another.
- Who has dialled lets go: of its pairs that are not standing at most so many stay, and the one that
  was used longest ago goes first; one in use never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shared.errors import LocalProtocolError, RemoteProtocolError, WorkerLost
from shared.ids import Incarnation, MeshPeer

WANTED_S = 30.0
"""How long a worker tries to make a pair that a gateway has asked for."""

REDIAL_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class PairState(Enum):
    """APART: no pair, and none wanted. DIALLING, ANSWERING: it is made, by our call or by theirs.
    READY: canaries have crossed. PAUSED: wanted, and dialled again soon."""

    APART = "apart"
    DIALLING = "dialling"
    ANSWERING = "answering"
    READY = "ready"
    PAUSED = "paused"


class PairEvent(Enum):
    """What can happen to a pair."""

    WANTED = "wanted"  # a gateway lists the peer, or asks for a pair with it
    DIALLED = "dialled"  # the peer has dialled, and may
    MADE = "made"  # right bytes have crossed
    LOST = "lost"  # it failed or broke, and is wanted
    ENDED = "ended"  # the same, and nobody wants it
    DUE = "due"  # the pause is over


_S, _E = PairState, PairEvent

MOVES: dict[tuple[PairState, PairEvent], PairState] = {
    (_S.APART, _E.WANTED): _S.DIALLING,
    (_S.APART, _E.DIALLED): _S.ANSWERING,
    (_S.DIALLING, _E.DIALLED): _S.ANSWERING,  # crossed, and theirs counts
    (_S.DIALLING, _E.MADE): _S.READY,
    (_S.DIALLING, _E.LOST): _S.PAUSED,
    (_S.DIALLING, _E.ENDED): _S.APART,
    (_S.ANSWERING, _E.MADE): _S.READY,
    (_S.ANSWERING, _E.LOST): _S.PAUSED,
    (_S.ANSWERING, _E.ENDED): _S.APART,
    (_S.READY, _E.LOST): _S.PAUSED,
    (_S.READY, _E.ENDED): _S.APART,
    (_S.PAUSED, _E.DUE): _S.DIALLING,
    (_S.PAUSED, _E.DIALLED): _S.ANSWERING,
    (_S.PAUSED, _E.ENDED): _S.APART,
}


class Dial(NamedTuple):
    """Call this peer; ``made`` or ``ended`` follows."""

    peer: MeshPeer


class StopDial(NamedTuple):
    """Break the call off; nothing more is heard of it."""

    peer: Incarnation


class LetGo(NamedTuple):
    """Close this pair; ``ended`` follows."""

    peer: Incarnation


Effect = Dial | StopDial | LetGo


@dataclass(slots=True, eq=False)
class _Pair:
    """What is known of one peer. address: where a gateway says that it is."""

    state: PairState = PairState.APART
    peer: MeshPeer | None = None
    is_ours: bool = False
    wanted_until: float = 0.0
    num_failed: int = 0
    due_at: float | None = None

    def step(self, event: PairEvent) -> None:
        after = MOVES.get((self.state, event))
        if after is None:
            raise LocalProtocolError(f"a pair that is {self.state.value} cannot be {event.value}")
        self.state, self.due_at = after, None


class Pairs:
    """All pairs of one worker. max_warm: of those that it dialled and that are not standing."""

    def __init__(self, own: Incarnation, *, max_warm: int) -> None:
        self._own = own
        self._max_warm = max_warm
        self._standing: dict[Incarnation, MeshPeer] = {}
        self._pairs: dict[Incarnation, _Pair] = {}

    def listed(self, peers: Iterable[MeshPeer], now: float) -> list[Effect]:
        """These are the standing partners. A pair with one that is no more of them stays."""
        self._standing = {peer.incarnation: peer for peer in peers}
        effects: list[Effect] = []
        for peer in self._standing.values():
            effects += self._want(peer)
        return effects

    def asked(self, peer: MeshPeer, now: float) -> list[Effect]:
        """A gateway asks for a pair with this one."""
        effects = self._want(peer)
        self._pairs[peer.incarnation].wanted_until = now + WANTED_S
        return effects

    def dialled(self, peer: Incarnation) -> list[Effect]:
        """A peer calls, and its call is taken: ``made`` or ``ended`` follows.

        Raises WorkerLost: there is a pair, or our own call counts. RemoteProtocolError: it says
        that it is us.
        """
        if peer == self._own:
            raise RemoteProtocolError("a worker is no partner of its own", param="incarnation")
        pair = self._pairs.setdefault(peer, _Pair())
        is_dialling = pair.state is PairState.DIALLING
        if pair.state in (PairState.ANSWERING, PairState.READY) or (
            is_dialling and self._own < peer
        ):
            raise WorkerLost("these two workers have a pair, or are making it", code="crossed")
        pair.step(PairEvent.DIALLED)
        pair.is_ours = False
        return [StopDial(peer)] if is_dialling else []

    def made(self, peer: Incarnation, idle: Sequence[Incarnation]) -> list[Effect]:
        """Right bytes have crossed. idle: peers whose pairs nothing uses, those used longest ago
        first."""
        pair = self._pairs[peer]
        pair.step(PairEvent.MADE)
        pair.num_failed = 0
        # Those that are here because they were needed once: they are bounded.
        warm = {
            peer
            for peer, it in self._pairs.items()
            if it.state is PairState.READY and it.is_ours and peer not in self._standing
        }
        effects: list[Effect] = []
        excess = max(0, len(warm) - self._max_warm)
        for spare in [it for it in idle if it in warm and it != peer][:excess]:
            # Else its end would look like a loss, and it would be dialled again.
            self._pairs[spare].wanted_until = 0.0
            effects.append(LetGo(spare))
        return effects

    def ended(self, peer: Incarnation, now: float) -> list[Effect]:
        """A call that failed, or a pair that is lost."""
        pair = self._pairs[peer]
        if peer not in self._standing and now >= pair.wanted_until:
            pair.step(PairEvent.ENDED)
            del self._pairs[peer]
            return []
        pair.step(PairEvent.LOST)
        pair.due_at = now + REDIAL_S[min(pair.num_failed, len(REDIAL_S) - 1)]
        pair.num_failed += 1
        return []

    def tick(self, now: float) -> list[Effect]:
        """Dial who is due. Call at ``next_tick_at``."""
        effects: list[Effect] = []
        for peer, pair in list(self._pairs.items()):
            if pair.due_at is None or pair.due_at > now:
                continue
            if peer not in self._standing and now >= pair.wanted_until:
                pair.step(PairEvent.ENDED)
                del self._pairs[peer]
            else:
                pair.step(PairEvent.DUE)
                effects += self._dial(pair)
        return effects

    @property
    def next_tick_at(self) -> float | None:
        """When the next one is due; None = nobody."""
        due = (pair.due_at for pair in self._pairs.values() if pair.due_at is not None)
        return min(due, default=None)

    def state_of(self, peer: Incarnation) -> PairState:
        """How it stands with a peer."""
        pair = self._pairs.get(peer)
        return PairState.APART if pair is None else pair.state

    def _want(self, peer: MeshPeer) -> list[Effect]:
        pair = self._pairs.setdefault(peer.incarnation, _Pair())
        pair.peer = peer
        if pair.state is not PairState.APART:
            return []
        pair.step(PairEvent.WANTED)
        return self._dial(pair)

    def _dial(self, pair: _Pair) -> list[Effect]:
        assert pair.peer is not None
        pair.is_ours = True
        return [Dial(pair.peer)]
