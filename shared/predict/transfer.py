"""How long KV takes from one worker to another: a constant and so much a byte, learned from
receipts, apart for every source, destination and lane."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from shared.ids import Incarnation
from shared.predict.least_squares import LeastSquares

MAX_LINKS = 4096
"""Links that are remembered; of more the one that was silent longest is forgotten."""


class KvLink(NamedTuple):
    """From whom to whom, and what carries it (``shared/lanes.py``)."""

    source: Incarnation
    destination: Incarnation
    lane: str


class TransferTimes:
    """All links of a mesh. A link that was never used is predicted as its lane is in the mean, and
    an unknown lane not at all."""

    def __init__(self) -> None:
        self._links: OrderedDict[KvLink, LeastSquares] = OrderedDict()
        self._lanes: dict[str, LeastSquares] = {}
        self._last_lane: OrderedDict[tuple[Incarnation, Incarnation], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._links)

    def observe(self, link: KvLink, num_bytes: int, seconds: float) -> None:
        """Take in one transfer; one of nothing, or in no time, is none."""
        if num_bytes <= 0 or seconds <= 0:
            return
        line = self._links.pop(link, None) or LeastSquares(2)
        self._links[link] = line
        if len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        pair = link.source, link.destination
        self._last_lane[pair] = link.lane
        self._last_lane.move_to_end(pair)
        if len(self._last_lane) > MAX_LINKS:
            self._last_lane.popitem(last=False)
        lane = self._lanes.setdefault(link.lane, LeastSquares(2))
        for each in (line, lane):
            each.observe((1.0, num_bytes), seconds)

    def predict(self, link: KvLink, num_bytes: int) -> float | None:
        """Return seconds; None = nothing like it was seen."""
        line = self._links.get(link) or self._lanes.get(link.lane)
        if line is None:
            return None
        constant_s, byte_s = line.solve()
        return constant_s + byte_s * num_bytes

    def between(
        self, source: Incarnation, destination: Incarnation, num_bytes: int
    ) -> float | None:
        """Return seconds over the lane that the pair used last; None = it used none yet."""
        lane = self._last_lane.get((source, destination))
        return None if lane is None else self.predict(KvLink(source, destination, lane), num_bytes)
