"""What moves over one link in one direction, for all its transfers: how many frames may be on their
way at once, and until when one that seems to stand still may only be slow.

Frames of one link share its bandwidth. Where it is slow, those of one transfer arrive late because
those of others go before them; and what is on its way must cross before it can be cancelled. Few
are therefore on their way there, which also leaves staging slots to quicker links.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.transfer.plan import Frame, FrameRule

SLOWEST_BYTES_S = 128 << 10
"""What a link carries at least (1 Mbit/s): a frame that takes longer is lost."""

LONG_S, SHORT_S = 2.0, 1.0
"""Of a frame on its way: after longer ones fewer are sent at once, after shorter ones more."""


class Flow:
    """One direction of one link. rule: what its handshake agreed on. most: frames that may be on
    their way at once, never more than ``num_slots``. num_transfers: that share it."""

    __slots__ = ("_moved_at", "_num_slots", "most", "num_in_flight", "num_transfers", "rule")

    def __init__(self, rule: FrameRule, num_slots: int) -> None:
        self.rule = rule
        self.most = self._num_slots = num_slots
        self.num_in_flight = self.num_transfers = 0
        self._moved_at = float("-inf")

    @property
    def is_full(self) -> bool:
        """Whether the next frame must wait until one of those on their way has crossed."""
        return self.num_in_flight >= self.most

    def moved(self, now: float) -> None:
        """The transport is done with a frame."""
        self._moved_at = now

    def crossed(self, took_s: float) -> None:
        """A frame has crossed, so long after it was sent."""
        if took_s > LONG_S:
            self.most = max(1, self.most // 2)
        elif took_s < SHORT_S:
            self.most = min(self._num_slots, self.most + 1)

    def waits_until(self, since: float, patience_s: float, frames: Iterable[Frame]) -> float:
        """Return until when a transfer waits for those of its frames that are on their way.
        since: its last own progress."""
        longest_s = max((it.num_bytes for it in frames), default=0) / SLOWEST_BYTES_S
        return max(since, self._moved_at) + patience_s + longest_s
