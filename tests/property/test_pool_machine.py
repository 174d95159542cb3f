"""The block pool against a naive model: who holds what, what is cached, and whose KV is in a
block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import PrefixChain

NUM_BLOCKS, BLOCK_SIZE = 8, 2

# Few tokens and salts, so that prefixes collide all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SALTS = st.sampled_from([b"", b"a"])

Prefix = tuple[bytes, tuple[int, ...]]


@dataclass(eq=False)
class Owner:
    """Somebody with a block table."""

    salt: bytes
    tokens: list[int]
    chain: PrefixChain
    table: BlockTable
    num_computed: int

    def prefix(self, block_idx: int) -> Prefix:
        """What the KV in a full block of this owner stands for."""
        return self.salt, tuple(self.tokens[: (block_idx + 1) * BLOCK_SIZE])


class PoolMachine(RuleBasedStateMachine):
    """Acquire, grow, compute, release, in any order."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.live: list[Owner] = []
        self.cached: dict[Prefix, int] = {}

    @property
    def held(self) -> set[int]:
        """Blocks that the model says are held."""
        return {block for owner in self.live for block in owner.table.blocks}

    def forget(self, blocks: list[int]) -> None:
        """New blocks hold nothing that may be found."""
        self.cached = {key: block for key, block in self.cached.items() if block not in blocks}

    @rule(
        target=owners,
        salt=SALTS,
        tokens=TOKENS,
        extra=st.integers(0, 4),
        cap=st.integers(0, 12),
        keep_free=st.integers(0, 3),
    )
    def acquire(self, salt: bytes, tokens: list[int], extra: int, cap: int, keep_free: int) -> Any:
        """A newcomer gets the longest cached prefix and new blocks, or nothing."""
        expected: list[int] = []
        for idx in range(min(cap, len(tokens)) // BLOCK_SIZE):
            block = self.cached.get((salt, tuple(tokens[: (idx + 1) * BLOCK_SIZE])))
            if block is None:
                break
            expected.append(block)
        num_tokens = len(tokens) + extra
        num_new = self.pool.num_blocks_for(num_tokens) - len(expected)
        held = self.held
        room = NUM_BLOCKS - len(held | set(expected))

        before, chain = self.pool.statistics(), self.pool.new_chain(salt)
        table = self.pool.acquire(
            chain, tokens, num_tokens, max_hit_tokens=cap, keep_free=keep_free
        )
        if room - num_new < keep_free:
            assert table is None
            assert self.pool.statistics() == before
            return None
        assert table is not None
        assert list(table.blocks[: len(expected)]) == expected
        assert table.num_hit_tokens == len(expected) * BLOCK_SIZE
        new = table.blocks[len(expected) :]
        assert len(new) == len(set(new)) == num_new
        assert not set(new) & (held | set(expected))
        self.forget(new)
        owner = Owner(salt, tokens, chain, table, table.num_hit_tokens)
        self.live.append(owner)
        return owner

    @rule(owner=owners, token=st.integers(0, 1), num=st.integers(1, 4))
    def grow(self, owner: Owner | None, token: int, num: int) -> None:
        """Room for more tokens, all of it or none."""
        if owner not in self.live:
            return
        assert owner is not None
        before, held = list(owner.table.blocks), self.held
        num_tokens = len(owner.tokens) + num
        fits = self.pool.num_blocks_for(num_tokens) - len(before) <= NUM_BLOCKS - len(held)
        assert self.pool.grow(owner.table, num_tokens) == fits
        new = owner.table.blocks[len(before) :]
        assert list(owner.table.blocks[: len(before)]) == before
        assert not set(new) & held
        if fits:
            needed = self.pool.num_blocks_for(num_tokens)
            assert len(owner.table.blocks) == max(len(before), needed)
            owner.tokens += [token] * num
            self.forget(new)
        else:
            assert not new

    @rule(owner=owners, num=st.integers(1, 12))
    def compute(self, owner: Owner | None, num: int) -> None:
        """KV of more tokens is written; full blocks can be found from now on."""
        if owner not in self.live:
            return
        assert owner is not None
        stop = min(owner.num_computed + num, len(owner.tokens))
        self.pool.publish(owner.table, owner.chain, owner.tokens, stop)
        for idx in range(owner.num_computed // BLOCK_SIZE, stop // BLOCK_SIZE):
            self.cached.setdefault(owner.prefix(idx), owner.table.blocks[idx])
        owner.num_computed = max(owner.num_computed, stop)

    @rule(owner=owners)
    def release(self, owner: Owner | None) -> None:
        """Its blocks go; what is cached stays findable until somebody needs the room."""
        if owner not in self.live:
            return
        assert owner is not None
        self.live.remove(owner)
        self.pool.release(owner.table)

    @invariant()
    def counts_hold(self) -> None:
        """num_blocks = free + idle + held, references equal owners, and the model agrees."""
        self.pool.check_integrity([owner.table for owner in self.live])
        stats = self.pool.statistics()
        assert stats.num_held == len(self.held)
        assert stats.num_free + stats.num_idle == NUM_BLOCKS - len(self.held)
        assert stats.num_cached == len(self.cached)

    @invariant()
    def writers_are_alone(self) -> None:
        """A block that an owner may still write is in no other table."""
        for owner in self.live:
            private = set(owner.table.blocks[owner.num_computed // BLOCK_SIZE :])
            for other in self.live:
                assert other is owner or not private & set(other.table.blocks)


TestPoolMachine = PoolMachine.TestCase
