"""How often one global prefix cache would have hit: a trace's blocks replayed against a policy.

Mooncake (arXiv 2407.00079, table 1) asks this of its trace. The rules: a request hits with its
leading blocks that are there when it arrives, up to the first that is not; then every block of it
is used, in order, and one that is not there comes in, for which one other goes if the cache is
full. Time plays no part. The hit rate is hits by all blocks asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Policy = Literal["lru", "lfu", "length-aware"]
POLICIES: Final[tuple[Policy, ...]] = ("lru", "lfu", "length-aware")


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a trace found in a cache, in blocks."""

    num_requests: int
    num_blocks: int
    num_hits: int
    num_distinct: int
    num_evicted: int

    @property
    def hit_rate(self) -> float:
        """Share of blocks that need not be computed."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0


class BlockCache:
    """Which blocks are there, and which one goes: the one with the fewest uses since it came in
    (not of lru), of equals the one latest in its request (of length-aware alone), then the one that
    was used longest ago."""

    def __init__(self, capacity: int | None, policy: Policy) -> None:
        """capacity: in blocks, None = all that come."""
        self._capacity = capacity
        self._counts_uses = policy != "lru"
        self._sign = -1 if policy == "length-aware" else 0
        self._uses: dict[int, tuple[int, int, int]] = {}
        self._heap: list[tuple[int, int, int, int]] = []
        self._clock = 0
        self.num_evicted = 0

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int, position: int) -> None:
        """Use a block, with room made for it: the newcomer is no candidate itself. position: in
        its request, from 0."""
        if self._capacity is not None and block not in self and len(self._uses) >= self._capacity:
            self._evict()
        self._clock += 1
        num_uses = self._uses[block][0] + self._counts_uses if block in self._uses else 1
        self._uses[block] = key = (num_uses, self._sign * position, self._clock)
        if self._capacity is not None:
            heapq.heappush(self._heap, (*key, block))

    def _evict(self) -> None:
        self.num_evicted += 1
        while True:
            *key, block = heapq.heappop(self._heap)
            if self._uses.get(block) == tuple(key):  # else it has been used since
                del self._uses[block]
                return


def replay(
    requests: Iterable[Sequence[int]],
    cache: BlockCache,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> Replayed:
    """Return what requests, each the ids of its blocks in order, find in a cache."""
    num_requests = num_blocks = num_hits = 0
    seen: set[int] = set()
    for blocks in requests:
        num_requests += 1
        num_blocks += len(blocks)
        for block in blocks:
            if block not in cache:
                break
            num_hits += 1
        for position, block in enumerate(blocks):
            cache.use(block, position)
        seen.update(blocks)
        if num_requests % 256 == 0:
            on_progress(num_requests)
    return Replayed(num_requests, num_blocks, num_hits, len(seen), cache.num_evicted)
