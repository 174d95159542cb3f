"""Allocator, prefix cache and pool: what the model of tests/property/test_pool_machine.py leaves
open."""

from __future__ import annotations

import pytest

from shared.errors import InvariantViolated, LocalProtocolError
from shared.kv.allocator import BlockAllocator
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_cache import PrefixCache


def a_table(pool: BlockPool, tokens: range, *, salt: bytes = b"") -> BlockTable:
    """Acquire blocks for the tokens, and say that their KV is written."""
    chain = pool.new_chain(salt)
    table = pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens))
    assert table is not None
    pool.publish(table, chain, tokens, len(tokens))
    return table


def hit_tokens(pool: BlockPool, tokens: range, *, salt: bytes = b"") -> int:
    """How many tokens of a newcomer would be found; leaves the pool's blocks as they were."""
    table = pool.acquire(pool.new_chain(salt), tokens, len(tokens), max_hit_tokens=len(tokens))
    assert table is not None
    pool.release(table)
    return table.num_hit_tokens


def test_free_blocks_are_handed_out_in_the_order_in_which_they_came() -> None:
    """A freed block goes to the end of the line."""
    allocator = BlockAllocator(3)
    assert allocator.take(3) == [0, 1, 2]
    for block in (2, 0):
        allocator.drop([block])
        allocator.put_back(block)
    assert allocator.take(2) == [2, 0]


def test_a_block_is_not_freed_twice() -> None:
    """Dropping more references than there are is our bug, said at once."""
    allocator = BlockAllocator(1)
    (block,) = allocator.take(1)
    assert allocator.drop([block]) == [0]
    with pytest.raises(LocalProtocolError, match="freed twice"):
        allocator.drop([block])


def test_a_held_block_cannot_be_put_back() -> None:
    """Only an unreferenced block may become free."""
    allocator = BlockAllocator(1)
    with pytest.raises(LocalProtocolError):
        allocator.put_back(allocator.take(1)[0])


def test_taking_from_an_empty_list_is_an_error() -> None:
    """The allocator does not know about cached blocks: its caller looks first."""
    allocator = BlockAllocator(1)
    allocator.take(1)
    with pytest.raises(LocalProtocolError):
        allocator.take(1)


def test_a_lost_block_is_noticed() -> None:
    """The integrity check counts every block exactly once."""
    allocator = BlockAllocator(2)
    allocator.drop(allocator.take(1))  # neither free, nor held, nor said to be idle
    with pytest.raises(InvariantViolated, match="2 != 1 free"):
        allocator.check_integrity(idle=[])
    allocator.check_integrity(idle=[0])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    """A pool has blocks, and blocks have positions."""
    with pytest.raises(LocalProtocolError):
        BlockPool(num_blocks, block_size)


def test_what_is_claimed_is_kept_from_newcomers() -> None:
    """Sequences that run here come before reservations."""
    pool = BlockPool(4, 4)
    assert pool.keep_free_for_newcomers == 0
    pool.claim(2)
    assert pool.keep_free_for_newcomers == 2


def test_tenants_never_share() -> None:
    """Another salt is another prefix, whatever the tokens."""
    pool = BlockPool(8, 4)
    a_table(pool, range(8), salt=b"a")
    assert hit_tokens(pool, range(8), salt=b"b") == 0
    assert hit_tokens(pool, range(8), salt=b"a") == 8


def test_the_block_idle_longest_is_evicted_first_and_tails_before_heads() -> None:
    """Free blocks go first; then the least recently released, a chain from its end."""
    pool = BlockPool(4, 4)
    old, young = a_table(pool, range(8)), a_table(pool, range(100, 108))
    pool.release(old)
    pool.release(young)
    a_table(pool, range(200, 204))
    assert hit_tokens(pool, range(100, 108)) == 8
    assert hit_tokens(pool, range(8)) == 4


def test_being_found_again_makes_a_prefix_young() -> None:
    """Eviction is by last use, not by first."""
    pool = BlockPool(2, 4)
    for tokens in (range(4), range(100, 104), range(4)):
        pool.release(a_table(pool, tokens))
    a_table(pool, range(200, 204))
    assert hit_tokens(pool, range(4)) == 4
    assert hit_tokens(pool, range(100, 104)) == 0


def test_a_copy_is_no_use() -> None:
    """Blocks that were copied go in the order in which they were last used: what a prompt begins
    with, which is copied first, after what continues it."""
    pool = BlockPool(4, 4)
    pool.release(a_table(pool, range(12)))
    for block in (0, 1, 2):
        pool.release(pool.hold([block]))
    a_table(pool, range(200, 208))
    assert pool.num_cached_tokens(pool.new_chain(), range(12), 12) == 8


def test_what_is_copied_is_not_evicted() -> None:
    """It is nobody's room before the copy is over, whoever uses the block meanwhile."""
    pool = BlockPool(2, 4)
    pool.release(a_table(pool, range(8)))
    copies = [pool.hold([0, 1]), pool.hold([1])]
    assert pool.num_available == 0
    assert pool.acquire(pool.new_chain(), range(100, 104), 4, max_hit_tokens=0) is None
    again = pool.acquire(pool.new_chain(), range(8), 8, max_hit_tokens=8)
    assert again is not None
    assert again.num_hit_tokens == 8
    pool.check_integrity([*copies, again])
    pool.release(copies[0])
    pool.release(again)
    pool.check_integrity(copies[1:])
    assert pool.num_available == 1
    a_table(pool, range(100, 104))
    pool.release(copies[1])
    assert pool.num_available == 1
    assert pool.num_cached_tokens(pool.new_chain(), range(8), 8) == 0
    pool.check_integrity()


def test_without_caching_every_block_is_private() -> None:
    """The cache can be turned off, and then nothing is ever found."""
    pool = BlockPool(4, 4, cache_prefixes=False)
    pool.release(a_table(pool, range(8)))
    assert hit_tokens(pool, range(8)) == 0
    assert pool.statistics().num_cached == 0


def test_a_released_table_is_dead() -> None:
    """Releasing twice, growing or publishing afterwards are our bugs."""
    pool = BlockPool(4, 4)
    table = a_table(pool, range(4))
    pool.release(table)
    with pytest.raises(LocalProtocolError):
        pool.release(table)
    with pytest.raises(LocalProtocolError):
        pool.grow(table, 8)
    with pytest.raises(LocalProtocolError):
        pool.publish(table, pool.new_chain(), range(4), 4)


def test_a_table_that_nobody_counts_is_noticed() -> None:
    """References must equal the tables that name a block."""
    pool = BlockPool(4, 4)
    a_table(pool, range(4))
    with pytest.raises(InvariantViolated, match="0 tables name it"):
        pool.check_integrity([])


def test_statistics_add_up_and_count_hits() -> None:
    """num_blocks = free + idle + held, and tokens that were found are counted."""
    pool = BlockPool(8, 4)
    pool.release(a_table(pool, range(8)))
    a_table(pool, range(12))
    stats = pool.statistics()
    assert stats.num_free + stats.num_idle + stats.num_held == stats.num_blocks == 8
    assert stats.num_hit_tokens == 8
    assert stats.num_free + stats.num_idle == pool.num_available == 5


def test_matching_changes_nothing() -> None:
    """A look-up alone makes no prefix younger."""
    cache = PrefixCache()
    for block, key in enumerate((b"a", b"b")):
        cache.insert(key, block, 16)
        cache.set_idle(block)
    assert cache.match([b"a", b"x", b"b"]) == [0]
    assert cache.evict() == 0


def test_one_block_has_one_hash() -> None:
    """A block that is cached under two names would be evicted under one of them only."""
    cache = PrefixCache()
    cache.insert(b"a", 0, 16)
    with pytest.raises(LocalProtocolError):
        cache.insert(b"b", 0, 16)
