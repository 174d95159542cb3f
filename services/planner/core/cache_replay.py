"""How often one global prefix cache would have hit: a trace's blocks replayed against a policy.

Mooncake (arXiv 2407.00079, table 1) asks this of its trace. The rules: a request hits with its
leading blocks that are there when it arrives, up to the first that is not; then every block of it
is used, in order, and one that is not there comes in, for which one other goes if the cache is
full. Time plays no part. The hit rate is hits by all blocks asked for.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Policy = Literal["lru", "lfu", "length-aware"]
Later = Literal["evicted", "kept"]


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


class BlockCache(ABC):
    """Which blocks are there, and which one goes. capacity: in blocks, None = all that come."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self.num_evicted = 0

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def touch(self, block: int, position: int) -> None:
        """Use a block that is there, or let it in; position: in its request, from 0."""

    @abstractmethod
    def evict(self) -> None:
        """Let one block go."""

    def use(self, block: int, position: int) -> None:
        """Use a block, with room made for it: the newcomer is no candidate itself."""
        if self._capacity is not None and block not in self and len(self) >= self._capacity:
            self.evict()
            self.num_evicted += 1
        self.touch(block, position)


class LeastRecentlyUsed(BlockCache):
    """The block that was used longest ago goes."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._blocks: OrderedDict[int, None] = OrderedDict()  # by last use

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def touch(self, block: int, position: int) -> None:
        """See BlockCache."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def evict(self) -> None:
        """See BlockCache."""
        self._blocks.popitem(last=False)


class LeastFrequentlyUsed(BlockCache):
    """The block with the fewest uses since it came in goes; of equals by position, if it matters,
    then the one that was used longest ago."""

    def __init__(self, capacity: int | None, later: Later | None = None) -> None:
        """later: blocks at a later position go first ('evicted') or last ('kept') among equals."""
        super().__init__(capacity)
        self._sign = {None: 0, "evicted": -1, "kept": 1}[later]
        self._uses: dict[int, tuple[int, int, int]] = {}
        self._heap: list[tuple[int, int, int, int]] = []
        self._clock = 0

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def touch(self, block: int, position: int) -> None:
        """See BlockCache."""
        self._clock += 1
        num_uses = self._uses[block][0] + 1 if block in self._uses else 1
        self._uses[block] = key = (num_uses, self._sign * position, self._clock)
        if self._capacity is not None:
            heapq.heappush(self._heap, (*key, block))

    def evict(self) -> None:
        """See BlockCache."""
        while True:
            *key, block = heapq.heappop(self._heap)
            if self._uses.get(block) == tuple(key):  # else it has been used since
                del self._uses[block]
                return


POLICIES: Final[dict[Policy, Callable[[int | None, Later], BlockCache]]] = {
    "lru": lambda capacity, later: LeastRecentlyUsed(capacity),
    "lfu": lambda capacity, later: LeastFrequentlyUsed(capacity),
    "length-aware": LeastFrequentlyUsed,
}


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
