"""Heartbeats: the one rule by which every long-lived stream of the mesh decides whether its peer
lives.

A stopped process keeps its sockets open and looks alive to gRPC and to UCX, so silence is the only
witness (docs/protocol.md). Who has heard nothing for ``interval_s`` asks, and who is asked answers
at once; anything received counts as an answer. So the pace is that of who waits for the other: a
mesh in which nobody waits says little, however many streams it has. Pure: the clock is an argument.
It does not know what is sent, nor what a dead peer costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ASK_AFTER_S = 0.2
SUSPECT_AFTER_S = 0.6
DEAD_AFTER_S = 1.0
"""What a client waits for when a worker hangs; it has been asked four times then. bench/faults has
how long peers are silent while every core is busy."""

ROUND_TRIPS = 3
"""A lost packet is sent again after a round trip or two: a peer that is far away may be silent for
so many of them longer."""


class PeerState(Enum):
    """What silence says about a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # no new work for it
    DEAD = "dead"  # close the stream; fail or cancel what is on it


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessRule:
    """Seconds of silence until one asks, and asks again, until suspicion and until death; in this
    order."""

    interval_s: float = ASK_AFTER_S
    suspect_after_s: float = SUSPECT_AFTER_S
    dead_after_s: float = DEAD_AFTER_S

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError("liveness needs 0 < interval_s < suspect_after_s < dead_after_s")


IDLE = LivenessRule(interval_s=2.0, suspect_after_s=4.0, dead_after_s=6.0)
"""Of a peer for which nobody waits: there are as many of these as pairs of workers."""


class Liveness:
    """Watches one peer. Create it when the stream opens: opening counts as having heard.

    round_trip_s: to the peer and back, at least; 0 = next to nothing, or unknown.
    """

    __slots__ = ("_heard_at", "round_trip_s", "rule")

    def __init__(self, now: float, rule: LivenessRule | None = None) -> None:
        self.rule = rule or LivenessRule()
        self.round_trip_s = 0.0
        self._heard_at = now

    def heard(self, now: float) -> None:
        """Note that something arrived. Time never runs backwards: an older ``now`` changes
        nothing."""
        self._heard_at = max(self._heard_at, now)

    def follow(self, rule: LivenessRule, now: float) -> None:
        """Judge by another rule from now on. Silence that the one before allowed is not held
        against the peer."""
        if rule.interval_s < self.rule.interval_s:
            self.heard(now)
        self.rule = rule

    def slept(self, until: float, now: float) -> None:
        """Note that whoever watches meant to wake at ``until``: what came later it has not read,
        so that the time since then does not count as the peer's silence."""
        self._heard_at = min(now, self._heard_at + max(0.0, now - until))

    def silence_s(self, now: float) -> float:
        """Seconds since anything arrived."""
        return max(0.0, now - self._heard_at)

    def state(self, now: float) -> PeerState:
        """Judge the peer at this instant. DEAD is not remembered: who acts on it closes the
        stream."""
        # Compared as times, not as a difference: at `next_check_at` the verdict must have changed.
        heard_at = self._heard_at + ROUND_TRIPS * self.round_trip_s
        if now >= heard_at + self.rule.dead_after_s:
            return PeerState.DEAD
        if now >= heard_at + self.rule.suspect_after_s:
            return PeerState.SUSPECT
        return PeerState.ALIVE

    def is_asking(self, now: float) -> bool:
        """Whether nothing has been heard for so long that one asks."""
        return now >= self._heard_at + self.rule.interval_s

    def next_check_at(self, now: float) -> float:
        """The instant to sleep until: when to ask, or when the verdict changes if nothing is heard;
        at most an interval, for a longer sleep would not show when its sleeper stood still."""
        rule = self.rule
        is_alive = self.state(now) is PeerState.ALIVE
        heard_at = self._heard_at + ROUND_TRIPS * self.round_trip_s
        changes_at = heard_at + (rule.suspect_after_s if is_alive else rule.dead_after_s)
        asks_at = (now if self.is_asking(now) else self._heard_at) + rule.interval_s
        return min(changes_at, asks_at)
