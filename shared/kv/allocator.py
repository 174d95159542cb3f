"""Physical blocks and who counts their references. Knows nothing of tokens, hashes or requests.

Unit: one block = ``block_size`` token positions of KV in all layers (PagedAttention, Kwon et al.
2023, section 4). A block is *free* (on the list), *held* (references > 0) or *idle* (no reference,
not on the list: the prefix cache keeps it). The free list is FIFO, so a freed block rests as long
as possible and runs replay exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shared.errors import InvariantViolated, LocalProtocolError


class BlockAllocator:
    """Reference counts of ``num_blocks`` blocks and the list of free ones."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise LocalProtocolError(f"a pool needs at least one block, not {num_blocks}")
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self.num_held = 0
        """Blocks with at least one reference."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, in whatever state."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    def held(self) -> dict[int, int]:
        """Return of each held block how many owners it has."""
        return {block: count for block, count in enumerate(self._references) if count}

    def take(self, num: int) -> list[int]:
        """Take the blocks that have been free longest; their counts are 1.

        Raises LocalProtocolError: there are fewer (look at ``num_free`` first).
        """
        if num > len(self._free):
            raise LocalProtocolError("no free block: num_free must be looked at first")
        blocks = [self._free.popleft() for _ in range(num)]
        for block in blocks:
            self._references[block] = 1
        self.num_held += num
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a held or idle block. The caller knows that it is not free."""
        if self._references[block] == 0:
            self.num_held += 1
        self._references[block] += 1

    def drop(self, blocks: Iterable[int]) -> list[int]:
        """Remove one reference to each and return how many are left; at 0 the block is idle, not
        yet free."""
        references, left = self._references, list[int]()
        for block in blocks:
            if references[block] < 1:
                raise LocalProtocolError(f"block {block} is freed twice")
            references[block] = num = references[block] - 1
            left.append(num)
        self.num_held -= left.count(0)
        return left

    def put_back(self, block: int) -> None:
        """Put an idle block at the end of the free list."""
        if self._references[block] != 0:
            raise LocalProtocolError(f"block {block} is held and cannot be free")
        self._free.append(block)

    def check_integrity(self, idle: Iterable[int]) -> None:
        """Raise InvariantViolated unless every block is exactly one of free, idle, held."""
        free, kept, held = list(self._free), list(idle), self.held()
        if sorted([*free, *kept, *held]) != list(range(self.num_blocks)) or (
            len(held) != self.num_held
        ):
            raise InvariantViolated(
                f"blocks: {self.num_blocks} != {len(free)} free + {len(kept)} idle + "
                f"{len(held)} held (counted {self.num_held}), or one is in two places"
            )
