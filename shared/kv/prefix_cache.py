"""Which block holds the KV of which prefix: a map and an eviction order. Knows no reference counts
and no tokens.

Only full, computed blocks come in (``BlockPool.publish`` sees to it). A cached block that nobody
holds is *idle* and may be evicted, the one idle longest first. While one is copied elsewhere it is
not, and keeps its place: else copies, which take what a prompt begins with first, would have that
evicted before what continues it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shared.errors import InvariantViolated, LocalProtocolError
from shared.kv.events import BlockRemoved, BlockStored, KvListener, OnIdle


class PrefixCache:
    """Hash -> block, and the idle ones in the order in which they became idle."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # a dict is an ordered set
        self._num_copies: dict[int, int] = {}  # of blocks that are being copied
        self._num_idle_copied = 0
        self.listeners: list[tuple[KvListener, int]] = []
        """Each with the tokens at whose multiples those prefixes end that it is told of."""
        self.on_idle: OnIdle | None = None

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody holds or copies."""
        return len(self._idle) - self._num_idle_copied

    def idle_blocks(self) -> Iterator[int]:
        """Idle blocks, the next to be evicted first."""
        return (block for block in self._idle if block not in self._num_copies)

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached and nobody holds or copies it."""
        return block in self._idle and block not in self._num_copies

    def num_copies(self, block: int) -> int:
        """Return how many copies of the block are being made."""
        return self._num_copies.get(block, 0)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of the chain. Changes nothing, not even
        the order."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int, end: int, parent: bytes = b"") -> bool:
        """Cache a held block, or return False if that prefix has a block already (the newcomer
        stays private). end, parent: see ``BlockStored``, for those who listen."""
        if block in self._hash_of:
            raise LocalProtocolError(f"block {block} is cached under another hash")
        # Two computed the same prefix at once; references to the first block stay right.
        if block_hash in self._block_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        for tell, every in self.listeners:
            if end % every == 0:
                tell(BlockStored(block_hash, block, end, parent))
        return True

    def set_idle(self, block: int) -> bool:
        """Nobody holds the block any more: it becomes the last to be evicted. False = it is not
        cached."""
        if block not in self._hash_of:
            return False
        self._idle[block] = None
        self._num_idle_copied += block in self._num_copies
        if self.on_idle is not None:
            self.on_idle(block)
        return True

    def set_held(self, block: int) -> None:
        """Somebody holds the cached block, which may have been idle."""
        if block in self._idle:
            del self._idle[block]
            self._num_idle_copied -= block in self._num_copies

    def begin_copy(self, block: int) -> None:
        """Keep the cached block from being evicted; if it is idle, where it stands."""
        if block not in self._num_copies:
            self._num_idle_copied += block in self._idle
        self._num_copies[block] = self.num_copies(block) + 1

    def end_copy(self, block: int) -> None:
        """A copy is over: after the last one the block may be evicted when its turn comes."""
        self._num_copies[block] -= 1
        if not self._num_copies[block]:
            del self._num_copies[block]
            self._num_idle_copied -= block in self._idle

    def evict(self) -> int:
        """Forget the block that has been idle longest and return it."""
        block = next(iter(self._idle if not self._num_copies else self.idle_blocks()))
        del self._idle[block]
        key = self._hash_of.pop(block)
        del self._block_of[key]
        for tell, _ in self.listeners:
            tell(BlockRemoved(key, block))
        return block

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless the two maps mirror each other and idle blocks are
        cached."""
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise InvariantViolated(
                f"prefix cache: {len(self._block_of)} hashes and {len(self._hash_of)} blocks differ"
            )
        if any(block not in self._hash_of for block in self._idle):
            raise InvariantViolated("prefix cache: an idle block is not cached")
        if self._num_idle_copied != sum(block in self._idle for block in self._num_copies):
            raise InvariantViolated("prefix cache: idle blocks that are copied are counted wrong")
