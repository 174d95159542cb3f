"""A tier's slots against a naive model: who is in which slot, whose bytes a slot has, and what may
be handed out."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.kv.pool import BlockPool, BlockTable
from shared.kv.tiers import CachePolicy, SlotState, SlotTier, WriteBehind

NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 6, 2, 4

TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=8)


class TierMachine(RuleBasedStateMachine):
    """Prompts come and go in a small pool; copies begin, and end in any order, well or badly.

    Bytes are modelled as the key that they stand for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.queue = WriteBehind()
        self.pool.listen(self.queue)
        self.pool.when_idle(self.queue.idle)
        self.block_bytes: dict[int, bytes] = {}
        self.slot_bytes: dict[int, bytes] = {}
        self.told: set[bytes] = set()
        self.stores: list[tuple[BlockTable, bytes, int]] = []
        self.loads: list[tuple[BlockTable, list[bytes], list[int], list[int]]] = []
        self.prompts: list[BlockTable] = []

    @initialize(policy=st.sampled_from(list(CachePolicy)))
    def choose(self, policy: CachePolicy) -> None:
        """Any policy must keep the rules."""
        self.tier = SlotTier(NUM_SLOTS, policy, self.tell)

    def tell(self, key: bytes, end: int, is_there: bool) -> None:
        assert (key in self.told) != is_there
        (self.told.add if is_there else self.told.remove)(key)

    @rule(tokens=TOKENS)
    def run_a_prompt(self, tokens: list[int]) -> None:
        """It takes what is cached, and computes the rest."""
        chain = self.pool.new_chain()
        table = self.pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens))
        if table is None:
            return
        hashes = chain.hashes(tokens, len(tokens) // BLOCK_SIZE)
        num_hits = table.num_hit_tokens // BLOCK_SIZE
        for idx, block in enumerate(table.blocks):
            key = hashes[idx] if idx < len(hashes) else b"private"
            if idx < num_hits:
                assert self.block_bytes[block] == key
            self.block_bytes[block] = key
        self.pool.publish(table, chain, tokens, len(tokens))
        self.prompts.append(table)

    @rule(idx=st.integers(0, 3))
    def end_a_prompt(self, idx: int) -> None:
        """Its blocks are idle, those that are being copied, too."""
        if idx < len(self.prompts):
            self.pool.release(self.prompts.pop(idx))

    @rule(most=st.integers(1, 3))
    def begin_stores(self, most: int) -> None:
        """Blocks are held while they are read; a slot being written is nobody's to find."""
        for event, slot in self.queue.take(self.tier, most):
            assert self.tier.num_found([event.key]) == 0
            assert slot not in [it[2] for it in self.stores]
            assert all(slot not in slots for _, _, slots, _ in self.loads)
            self.stores.append((self.pool.hold([event.block]), event.key, slot))

    @rule(idx=st.integers(0, 3), is_written=st.booleans())
    def end_store(self, idx: int, is_written: bool) -> None:
        """The block still has the bytes that its key stands for."""
        if idx >= len(self.stores):
            return
        table, key, slot = self.stores.pop(idx)
        assert self.block_bytes[table.blocks[0]] == key
        self.slot_bytes[slot] = key
        self.tier.end_store(key, is_written=is_written)
        self.pool.release(table)

    @rule(tokens=TOKENS)
    def begin_load(self, tokens: list[int]) -> None:
        """What the pool lacks of a prefix is read from the tier into new blocks."""
        chain = self.pool.new_chain()
        keys = chain.hashes(tokens, len(tokens) // BLOCK_SIZE)
        table = self.pool.pin(chain, tokens)
        num_hits = table.num_hit_tokens // BLOCK_SIZE
        found = keys[num_hits : num_hits + self.tier.num_found(keys[num_hits:])]
        if not found or not self.pool.grow(table, (num_hits + len(found)) * BLOCK_SIZE):
            self.pool.release(table)
            return
        slots = self.tier.begin_load(found)
        assert [self.slot_bytes[slot] for slot in slots] == found
        for block in table.blocks[num_hits:]:
            self.block_bytes[block] = b"being written"
        self.loads.append((table, found, slots, list(table.blocks[num_hits:])))

    @rule(idx=st.integers(0, 3), has_damage=st.booleans())
    def end_load(self, idx: int, has_damage: bool) -> None:
        """Its slots have not been given to anybody meanwhile; a damaged one goes."""
        if idx >= len(self.loads):
            return
        table, found, slots, blocks = self.loads.pop(idx)
        assert [self.slot_bytes[slot] for slot in slots] == found
        assert all(self.block_bytes[block] == b"being written" for block in blocks)
        bad = found[-1:] if has_damage else []
        self.tier.end_load(found, bad=bad)
        assert self.tier.num_found(bad) == 0
        self.pool.release(table)

    @invariant()
    def all_is_accounted_for(self) -> None:
        """Slots and blocks add up; what is told is what can be found."""
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        tables = [it[0] for it in (*self.stores, *self.loads)]
        self.pool.check_integrity([*self.prompts, *tables])
        stats = self.pool.statistics()
        assert stats.num_free + stats.num_idle + stats.num_held == NUM_BLOCKS
        moving = {key for _, key, _ in self.stores}
        moving |= {key for _, found, _, _ in self.loads for key in found}
        assert self.tier.num_moving == len(moving)
        assert all(self.tier.state(key) is not SlotState.THERE for key in moving)
        assert all(self.tier.num_found([key]) for key in self.told)

    def teardown(self) -> None:
        """When all copies have ended, nothing moves and no block is held."""
        while self.stores:
            self.end_store(0, True)
        while self.loads:
            self.end_load(0, False)
        while self.prompts:
            self.end_a_prompt(0)
        if hasattr(self, "tier"):
            self.all_is_accounted_for()
        assert self.pool.num_available == NUM_BLOCKS


TestTiers = TierMachine.TestCase
