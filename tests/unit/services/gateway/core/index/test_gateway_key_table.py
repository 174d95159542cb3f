"""The table of keys: a key whose two rows are the same one is there once."""

from __future__ import annotations

import random
from functools import reduce
from operator import xor

import numpy as np

from services.gateway.core.index.fetches import NOTHING
from services.gateway.core.index.key_table import Keys, KeyTable
from services.gateway.core.index.prefix_index import PrefixIndex, column_of
from shared.kv.journal import Journal
from shared.kv.pool import BlockPool
from shared.kv.prefix_hash import UNIT, prefix_hashes, root_hash
from shared.messages.columns import pack_u32

ONE_ROW = np.array([n << 32 | n for n in range(1, 7)], np.uint64)
"""Equal halves: both rows are the same, however many rows there are."""

TWO_ROWS = np.array([n << 32 | n + 1 for n in range(20, 26)], np.uint64)


def a_table(keys: Keys) -> KeyTable:
    table = KeyTable(1 << 16)
    table.put(keys, np.arange(1, len(keys) + 1, dtype=np.int32))
    return table


def test_a_prefix_ends_at_the_first_key_that_is_not_there() -> None:
    """One more found and one missing do not make up for each other."""
    table = a_table(ONE_ROW)
    asked = np.concatenate([ONE_ROW[:3], TWO_ROWS[:1], ONE_ROW[3:]])
    assert table.find_prefix(asked).tolist() == [1, 2, 3]
    assert table.find_prefix(ONE_ROW).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_key_is_taken_out_once() -> None:
    """The count is what there is room by."""
    table = a_table(np.concatenate([ONE_ROW, TWO_ROWS]))
    table.put(ONE_ROW, np.zeros(len(ONE_ROW), np.int32))
    assert len(table) == len(TWO_ROWS)
    assert table.find(ONE_ROW).tolist() == [0] * len(ONE_ROW)


def test_a_key_beside_full_rows_is_found_with_such_a_key() -> None:
    """Nine keys of one row: the ninth stands in the dict."""
    row = np.array([n << 40 | 5 << 32 | n << 8 | 5 for n in range(1, 10)], np.uint64)
    table = a_table(row)
    assert table.find(row).tolist() == [*range(1, 10)]
    assert table.find(row[[0, 8]]).tolist() == [1, 9]


def test_keys_of_small_changes_are_gathered_and_then_put_into_rows() -> None:
    """Numpy takes as long for one key as for a hundred: nobody sees where a key stands."""
    table, source = KeyTable(1 << 22), random.Random(1)
    keys = [source.getrandbits(64) | 1 for _ in range(3000)]
    for first in range(0, len(keys), 10):
        told = table.change(keys[first : first + 10], lambda before: dict.fromkeys(before, 7))
        assert told == (10, reduce(xor, keys[first : first + 10]))
    assert (len(table), table.find(np.array(keys, np.uint64)).tolist()) == (3000, [7] * 3000)
    assert table.num_bytes() < 250_000  # 120 each in the dict, which would be 360,000
    for first in range(0, len(keys), 500):
        few, many = keys[first : first + 10], keys[first + 10 : first + 500]
        assert table.change(few, lambda before: dict.fromkeys(before, 0))[0] == len(few)
        assert table.change(many, lambda before: {7: 0}) == (len(many), reduce(xor, many))
    assert (len(table), table.find(np.array(keys, np.uint64)).any()) == (0, False)


def test_of_a_small_table_the_index_has_what_the_pool_has() -> None:
    """Conversations through a pool that must evict (of Mooncake's form: each block has a number,
    and a turn repeats all that went before): at each prompt the index's hit is the pool's, and a
    sound link is never asked again."""
    source = random.Random(0)
    pool, journal, index = BlockPool(800, UNIT), Journal(UNIT), PrefixIndex(1 << 20)
    pool.listen(journal, UNIT)
    index.asked(0)
    journal.subscribe(0, UNIT)
    talks: list[list[int]] = [[0] for _ in range(60)]
    for number in range(1, 400):
        talk = source.choice(talks)
        talk.extend(1_000 * number + block for block in range(source.randrange(1, 12)))
        report = journal.report(0)
        assert report is not None
        assert not index.apply(0, report)
        tokens = [block for block in talk for _ in range(UNIT)]
        keys = column_of(prefix_hashes(root_hash(b"", b""), pack_u32(tokens)))
        chain = pool.new_chain()
        table = pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens))
        assert table is not None
        assert index.match(keys, UNIT, 0.0).get(0, NOTHING).tokens == table.num_hit_tokens
        pool.publish(table, chain, tokens, len(tokens))
        pool.release(table)
