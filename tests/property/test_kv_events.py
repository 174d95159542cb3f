"""What blocks tell, replayed, is what the pool finds: nothing too much, missing or early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.kv.events import BlockStored, KvEvent
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import PrefixChain

BLOCK_SIZE = 4

PROMPTS = [[n // 8, *range(n % 8 * 3), n] * 2 for n in range(16)]
"""Some are prefixes of others, some share only a beginning."""


class Listener:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.num_events = 0

    def __call__(self, event: KvEvent) -> None:
        self.num_events += 1
        if isinstance(event, BlockStored):
            assert event.key not in self.blocks
            self.blocks[event.key] = event.block
        else:
            assert self.blocks.pop(event.key) == event.block


def found(pool: BlockPool) -> dict[bytes, int]:
    """What the pool would find, read from its books."""
    return dict(pool._cache._block_of)  # pyright: ignore[reportPrivateUsage]


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=60))
def test_a_listener_knows_what_is_findable(moves: list[tuple[int, bool]]) -> None:
    """After any run of prompts in a small pool, at every moment."""
    pool, listener = BlockPool(12, BLOCK_SIZE), Listener()
    pool.listen(listener)
    held: list[tuple[BlockTable, PrefixChain, list[int]]] = []
    for number, releases in moves:
        tokens = PROMPTS[number]
        chain = pool.new_chain()
        table = pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens) - 1)
        assert listener.blocks == found(pool)  # what was evicted for it is gone already
        if table is not None:
            before = listener.num_events
            pool.publish(table, chain, tokens, 0)
            assert listener.num_events == before  # nothing is computed yet
            pool.publish(table, chain, tokens, len(tokens))
            held.append((table, chain, tokens))
        if held and (releases or table is None):
            pool.release(held.pop(0)[0])
        assert listener.blocks == found(pool)
