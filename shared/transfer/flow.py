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

SLOWER = 32.0
"""So many times longer than those before it a frame may take. Where they crossed at once, one that
is lost need not be waited for as over the slowest link."""

LEAST_BYTES = 1 << 20
"""A smaller frame takes as long as the way is, which says nothing of a larger one's bytes."""

LONG_S, SHORT_S = 2.0, 1.0
"""Of a frame on its way: after longer ones fewer are sent at once, after shorter ones more."""


class Flow:
    """One direction of one link. rule: what its handshake agreed on. most: frames that may be on
    their way at once, never more than ``num_slots``; at the sink: of one transfer. num_in_flight:
    that have a slot here. num_transfers: that share it."""

    __slots__ = (
        "_byte_s",
        "_moved_at",
        "_num_slots",
        "most",
        "num_in_flight",
        "num_transfers",
        "rule",
    )

    def __init__(self, rule: FrameRule, num_slots: int) -> None:
        self.rule = rule
        self.most = self._num_slots = num_slots
        self.num_in_flight = self.num_transfers = 0
        self._moved_at = float("-inf")
        self._byte_s = 1 / SLOWEST_BYTES_S

    @property
    def is_full(self) -> bool:
        """Whether the next frame must wait until one of those on their way has crossed."""
        return self.num_in_flight >= self.most

    def moved(self, now: float) -> None:
        """The transport is done with a frame."""
        self._moved_at = now

    def crossed(self, num_bytes: int, took_s: float) -> None:
        """A frame has crossed, so long after it was sent."""
        # What a slow one says is forgotten in some ten quick ones.
        self._byte_s = max(took_s / max(num_bytes, LEAST_BYTES), 0.5 * self._byte_s)
        if took_s > LONG_S:
            self.most = max(1, self.most // 2)
        elif took_s < SHORT_S:
            self.most = min(self._num_slots, self.most + 1)

    def waits_until(self, since: float, patience_s: float, frames: Iterable[Frame]) -> float:
        """Return until when a transfer waits for those of its frames that are on their way.
        since: its last own progress."""
        largest = max([it.num_bytes for it in frames], default=0)
        byte_s = min(SLOWER * self._byte_s, 1 / SLOWEST_BYTES_S)
        return max(since, self._moved_at) + patience_s + largest * byte_s
