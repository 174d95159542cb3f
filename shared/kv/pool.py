"""The pool as its users see it: block tables in, block tables out. Joins allocator and prefix
cache.

Knows tokens only through ``PrefixChain``; knows no requests, no layers and no bytes. "No room" is
an answer (None, False), never an error.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.errors import InvariantViolated, LocalProtocolError
from shared.kv.allocator import BlockAllocator
from shared.kv.events import KvListener, OnIdle
from shared.kv.prefix_cache import PrefixCache
from shared.kv.prefix_hash import PrefixChain, root_hash


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks one owner holds, in logical order. Made by ``BlockPool.acquire``; ends at
    ``release``.

    blocks: physical block of each logical block; read it freely, change it never; slice it rather
    than take a view, for it grows while steps that have it run. Plain 32-bit
    numbers: a step copies the tables of all its rows, and would else read every number as an object
    somewhere in memory.
    num_hit_tokens: leading tokens whose KV was found in the prefix cache: shared, read-only.
    is_copy: see ``BlockPool.hold``.
    """

    blocks: array[int]
    num_hit_tokens: int
    num_published: int
    is_released: bool = False
    is_copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """``num_blocks = num_free + num_idle + num_held``."""

    num_blocks: int
    num_free: int
    num_idle: int
    num_held: int
    num_cached: int
    num_claimed: int
    num_hit_tokens: int


class BlockPool:
    """All KV blocks of one engine.

    model_key: fingerprint + layout digest; keys the prefix cache. cache_prefixes: off = every block
    is private.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_key: bytes = b"",
        cache_prefixes: bool = True,
    ) -> None:
        if block_size < 1:
            raise LocalProtocolError(f"block_size must be at least 1, not {block_size}")
        self.num_blocks = num_blocks
        self._allocator = BlockAllocator(num_blocks)
        self._cache = PrefixCache()
        self.block_size = block_size
        """Token positions of a block."""
        self._model_key = model_key
        self._cache_prefixes = cache_prefixes
        self._num_claimed = self._num_yielded = 0
        self._num_hit_tokens = 0

    # --- what there is ---------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and evictable ones."""
        return self._allocator.num_free + self._cache.num_idle

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody holds or copies."""
        return self._cache.num_idle

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self._allocator.num_held

    @property
    def keep_free_for_newcomers(self) -> int:
        """What a new reservation must leave: what preempted or stalled sequences wait for."""
        return self._num_claimed

    @property
    def keep_free_for_answers(self) -> int:
        """What a reservation for an answer must leave."""
        return self._num_claimed - self._num_yielded

    def num_lacking(self, num_more: int = 0) -> int:
        """Return how many blocks are lacking: those that sequences here wait for, without what they
        yield to answers, and ``num_more``, less what is available; 0 = none."""
        return max(0, self.keep_free_for_answers + num_more - self.num_available)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` token positions take."""
        return -(-num_tokens // self.block_size)

    def claim(self, num_blocks: int, num_yielded: int = 0) -> None:
        """Set how many blocks are spoken for by sequences that run here but wait for room (not
        additive). num_yielded: of them, those that a reservation for an answer may have."""
        self._num_claimed, self._num_yielded = num_blocks, num_yielded

    def listen(self, listener: KvListener, every: int = 1) -> None:
        """Tell it of every prefix that becomes findable or goes, from now on. every: of those that
        become findable, only what ends at its multiples."""
        self._cache.listeners.append((listener, every))

    def when_idle(self, on_idle: OnIdle) -> None:
        """Tell it of every cached block that nobody holds any more, from now on."""
        self._cache.on_idle = on_idle

    # --- handing out and taking back -------------------------------------------------------------

    def new_chain(self, salt: bytes = b"") -> PrefixChain:
        """Return the empty hash chain of a new token list. salt: the tenant's; other salts never
        share KV."""
        return PrefixChain(root_hash(self._model_key, salt), self.block_size)

    def num_cached_tokens(
        self, chain: PrefixChain, tokens: Sequence[int], max_hit_tokens: int
    ) -> int:
        """Return how many tokens ``acquire`` would find cached now. Changes nothing."""
        return len(self._hits(chain, tokens, max_hit_tokens)) * self.block_size

    def _hits(self, chain: PrefixChain, tokens: Sequence[int], max_hit_tokens: int) -> list[int]:
        max_hit_blocks = min(max_hit_tokens, len(tokens)) // self.block_size
        if not self._cache_prefixes or max_hit_blocks <= 0:
            return []
        return self._cache.match(chain.hashes(tokens, max_hit_blocks))

    def acquire(
        self,
        chain: PrefixChain,
        tokens: Sequence[int],
        num_tokens: int,
        *,
        max_hit_tokens: int,
        keep_free: int = 0,
    ) -> BlockTable | None:
        """Take blocks for ``num_tokens`` positions, cached prefix first; all of them, or None and
        nothing changes.

            |-- hit (shared) --|------ new blocks ------|
            0      num_hit_tokens <= max_hit_tokens      num_tokens

        tokens: the token list, to look up its prefix; may be shorter than ``num_tokens`` (room to
        grow).
        max_hit_tokens: a prefill passes ``len(tokens) - 1``, for it must compute the last token to
        sample.
        keep_free: blocks that must stay available afterwards.
        """
        hits = self._hits(chain, tokens, min(max_hit_tokens, num_tokens))
        num_new = self.num_blocks_for(num_tokens) - len(hits)
        # Idle hits count as available, but this very call takes them.
        num_revived = sum(map(self._cache.is_idle, hits))
        if self.num_available - num_revived - num_new < keep_free:
            return None
        # Hits are held before new blocks are taken: that may evict idle ones, and these are idle
        # yet.
        table = self._hold(hits)
        table.blocks.extend(self._take(num_new))
        self._num_hit_tokens += table.num_hit_tokens
        return table

    def pin(self, chain: PrefixChain, tokens: Sequence[int]) -> BlockTable:
        """Hold what the cache has of this prefix, and nothing more: for who sends it on. That is no
        hit, for nothing is saved here."""
        return self._hold(self._hits(chain, tokens, len(tokens)))

    def hold(self, blocks: Sequence[int]) -> BlockTable:
        """Hold cached blocks, each for itself, for who copies them elsewhere. That is no use of
        them: those that are idle stay so, in their order, and are not evicted meanwhile."""
        if any(block not in self._cache for block in blocks):
            raise LocalProtocolError("only cached blocks can be held for a copy")
        for block in blocks:
            self._cache.begin_copy(block)
            self._allocator.share(block)
        return BlockTable(array("i", blocks), 0, num_published=len(blocks), is_copy=True)

    def _hold(self, hits: Sequence[int]) -> BlockTable:
        for block in hits:
            self._cache.set_held(block)
            self._allocator.share(block)
        num_hit_tokens = len(hits) * self.block_size
        return BlockTable(array("i", hits), num_hit_tokens, num_published=len(hits))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Extend the table to ``num_tokens`` positions; all of it, or False and nothing changes."""
        self._require_live(table)
        num_new = self.num_blocks_for(num_tokens) - len(table.blocks)
        if num_new <= 0:  # nearly always: a running answer fills its last block first
            return True
        if num_new > self.num_available:
            return False
        table.blocks.extend(self._take(num_new))
        return True

    def publish(
        self, table: BlockTable, chain: PrefixChain, tokens: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Make the table's full blocks whose KV is now written findable by others.

        Call after the step (or the verified transfer) that wrote them, never before.
        """
        self._require_live(table)
        num_full = num_computed_tokens // self.block_size
        if not self._cache_prefixes or num_full <= table.num_published:
            return
        insert, size, first = self._cache.insert, self.block_size, table.num_published
        hashes = chain.hashes(tokens, num_full)
        parent = hashes[first - 1] if first else b""
        for idx, block in enumerate(table.blocks[first:num_full], first):
            insert(hashes[idx], block, (idx + 1) * size, parent)
            parent = hashes[idx]
        table.num_published = num_full

    def release(self, table: BlockTable) -> None:
        """Give the blocks back: published ones stay cached until evicted, the others are free at
        once.

        Last block first, so that a prefix outlives its continuations. Raises LocalProtocolError:
        released before.
        """
        self._require_live(table)
        table.is_released = True
        blocks = table.blocks[::-1]
        for block, num_left in zip(blocks, self._allocator.drop(blocks), strict=True):
            if table.is_copy:
                self._cache.end_copy(block)
            # Others still share it; or who copied it held it alone, and it was idle all the while.
            elif num_left and num_left > self._cache.num_copies(block):
                continue
            elif not self._cache.set_idle(block):
                self._allocator.put_back(block)

    def _take(self, num: int) -> list[int]:
        for _ in range(num - self._allocator.num_free):
            self._allocator.put_back(self._cache.evict())
        return self._allocator.take(num)

    def _require_live(self, table: BlockTable) -> None:
        if table.is_released:
            raise LocalProtocolError("the block table was released before")

    # --- looking at it ---------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return all counts at once."""
        return PoolStatistics(
            num_blocks=self.num_blocks,
            num_free=self._allocator.num_free,
            num_idle=self._cache.num_idle,
            num_held=self._allocator.num_held,
            num_cached=len(self._cache),
            num_claimed=self._num_claimed,
            num_hit_tokens=self._num_hit_tokens,
        )

    def check_integrity(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Raise InvariantViolated unless ``num_blocks = free + idle + held``.

        tables: every live table there is; then each block's references must equal the tables that
        name it.
        """
        self._cache.check_integrity()
        self._allocator.check_integrity(self._cache.idle_blocks())
        if tables is None:
            return
        named = Counter(block for table in tables for block in table.blocks)
        held = Counter(self._allocator.held())
        if named != held:
            block = min(it for it in named | held if named[it] != held[it])
            raise InvariantViolated(
                f"block {block}: {named[block]} tables name it, {held[block]} references are "
                "counted"
            )

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.num_available}/{self.num_blocks} available, "
            f"{self._cache.num_idle} of them cached>"
        )
