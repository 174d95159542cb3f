"""Three gateways' indices against the pools of three workers: equal whenever digests agree, and
every single fault on the way is found at the next whole report."""

from __future__ import annotations

import random
from functools import reduce
from operator import xor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.index.fetches import NOTHING, Hit
from services.gateway.core.index.prefix_index import PrefixIndex, column_of
from services.gateway.core.index.prefixes import Indexed
from shared.kv import journal as journal_module
from shared.kv.journal import Journal, KvChanges, Tier, TierChanges, key_of, stride_of
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import UNIT, PrefixChain, prefix_hashes, root_hash
from shared.messages.columns import pack_u32

ROOT = root_hash(b"", b"")
NUM_GATEWAYS = 3
BLOCK_SIZES = 16, 64, 256

PROMPTS = [[n % 4] * UNIT + [n % 8] * UNIT + [n] * 2 * UNIT for n in range(16)]
"""Some share their first one, two or four granules."""


class Worker:
    """A pool and its journal; a restart is another one."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.block_size = BLOCK_SIZES[place]
        self.pool = BlockPool(10 * UNIT // self.block_size, self.block_size)
        self.journal = Journal(self.block_size)
        self.pool.listen(self.journal, UNIT)
        self.held: list[BlockTable] = []

    def compute(self, tokens: list[int], *, keep: bool) -> None:
        """Take blocks, publish them and, unless they are kept, give them back."""
        chain = self.pool.new_chain()
        while True:
            table = self.pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens) - 1)
            if table is not None:
                break
            self.pool.release(self.held.pop(0))
        self.pool.publish(table, chain, tokens, len(tokens))
        self.held.append(table)
        if not keep:
            self.pool.release(self.held.pop())

    def findable(self) -> set[int]:
        """Keys of the granules whose last block the pool would find, by its own books."""
        books = self.pool._cache._block_of  # pyright: ignore[reportPrivateUsage]
        stride = stride_of(UNIT, self.block_size)
        found: set[int] = set()
        for tokens in PROMPTS:
            chain = PrefixChain(ROOT, self.block_size)
            hashes = chain.hashes(tokens, len(tokens) // self.block_size)
            ends = range(self.block_size, len(tokens) + 1, self.block_size)
            found.update(
                key_of(name)
                for name, end in zip(hashes, ends, strict=True)
                if end % stride == 0 and name in books
            )
        return found


UNIVERSE = {
    int(key) for tokens in PROMPTS for key in column_of(prefix_hashes(ROOT, pack_u32(tokens)))
}


def indexed(index: PrefixIndex, place: int) -> set[int]:
    """What the index has of a worker, asked key by key."""
    return {key for key in UNIVERSE if place in index.holders(key)}


class Gateway:
    """An index that hears workers over links which may break."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.index = PrefixIndex(1 << 16)

    def connect(self, worker: Worker) -> None:
        """A new stream: ask for a snapshot."""
        self.index.asked(worker.place)
        worker.journal.subscribe(self.name, UNIT)

    def hear(self, worker: Worker, fault: random.Random | None = None) -> bool:
        """Take one report; returns whether it was whole."""
        changes = worker.journal.report(self.name)
        assert changes is not None
        if fault is not None:
            changes = damaged(changes, fault)
        if changes is not None and self.index.apply(worker.place, changes):
            worker.journal.subscribe(self.name, UNIT)
            return False
        return changes is not None and changes.is_whole


def damaged(changes: KvChanges, source: random.Random) -> KvChanges | None:
    """One key missing, alien or twice, one on the wrong side, or the whole report lost."""
    hbm = changes.tiers[Tier.HBM]
    stored, removed = list(hbm.stored), list(hbm.removed)
    kind = source.randrange(5)
    if kind == 0 and not changes.is_snapshot:
        return None
    side, other = (stored, removed) if source.random() < 0.5 else (removed, stored)
    if kind == 1 and side:
        side.pop(source.randrange(len(side)))
    elif kind == 2:
        side.append(source.choice(sorted(UNIVERSE)))
    elif kind == 3 and side:
        side.append(side[0])
    elif side:
        other.append(side.pop())
    tiers = (TierChanges(stored, removed, hbm.num_keys, hbm.digest), *changes.tiers[1:])
    return changes._replace(tiers=tiers)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["compute", "compute", "compute", "hear", "hear", "break", "restart", "fault"]
        ),
        st.integers(0, len(BLOCK_SIZES) - 1),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, NUM_GATEWAYS - 1),
        st.booleans(),
    ),
    max_size=80,
)


@given(MOVES, st.integers(0, 1 << 30), st.sampled_from([3, 1 << 13]))
def test_an_index_equals_the_pool_whenever_it_says_so(
    moves: list[tuple[str, int, int, int, bool]], seed: int, chunk: int
) -> None:
    """Under computing, evicting, broken links, restarts and damaged reports, at every moment; and
    all gateways are equal at the end, with no word between them."""
    source = random.Random(seed)
    workers = [Worker(place) for place in range(len(BLOCK_SIZES))]
    gateways = [Gateway(name) for name in range(NUM_GATEWAYS)]
    for gateway in gateways:
        for worker in workers:
            gateway.connect(worker)
    whole_chunk, journal_module.CHUNK_KEYS = journal_module.CHUNK_KEYS, chunk
    try:
        for what, at, prompt, by, flag in moves:
            worker, gateway = workers[at], gateways[by]
            match what:
                case "compute":
                    worker.compute(PROMPTS[prompt], keep=flag)
                case "hear" | "fault":
                    is_whole = gateway.hear(worker, source if what == "fault" else None)
                    if is_whole:
                        assert gateway.index.state(at) is Indexed.KNOWN
                        assert indexed(gateway.index, at) == worker.findable()
                case "break":
                    gateway.index.drop(at)
                    assert not indexed(gateway.index, at)
                    gateway.connect(worker)
                case _:
                    workers[at] = Worker(at)
                    for each in gateways:
                        each.index.drop(at)
                        assert not indexed(each.index, at)
                        each.connect(workers[at])
        for gateway in gateways:
            for worker in workers:
                for _ in range(40):
                    if gateway.hear(worker) and gateway.index.state(worker.place) == "known":
                        break
                assert indexed(gateway.index, worker.place) == worker.findable()
    finally:
        journal_module.CHUNK_KEYS = whole_chunk


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=1, max_size=30))
def test_a_sound_link_never_asks_again(moves: list[tuple[int, bool]]) -> None:
    """Digests differ for no other reason than a fault."""
    worker, gateway = Worker(0), Gateway(0)
    gateway.connect(worker)
    for prompt, keep in moves:
        worker.compute(PROMPTS[prompt], keep=keep)
        assert gateway.hear(worker)
    assert gateway.index.num_resyncs == 0


@given(st.lists(st.integers(0, 15), min_size=1, max_size=12), st.integers(0, 1 << 30))
def test_a_damaged_report_is_found_at_once_or_was_none(prompts: list[int], seed: int) -> None:
    """Whatever the fault did to the index, a report that is taken as whole leaves it equal."""
    worker, gateway, source = Worker(1), Gateway(0), random.Random(seed)
    gateway.connect(worker)
    gateway.hear(worker)
    for prompt in prompts:
        worker.compute(PROMPTS[prompt], keep=False)
    changes = worker.journal.report(0)
    assert changes is not None
    damage = damaged(changes, source)
    has_asked = damage is not None and gateway.index.apply(1, damage)
    is_equal = indexed(gateway.index, 1) == worker.findable()
    if damage is None:  # lost as a whole: the next one tells
        following = worker.journal.report(0)
        assert following is not None
        has_asked = gateway.index.apply(1, following)
        is_equal = changes.tiers[0].stored == changes.tiers[0].removed == []
    assert has_asked or is_equal


@given(st.lists(st.integers(0, 15), max_size=20), st.integers(0, 15))
def test_hits_are_what_the_pools_would_find(computed: list[int], asked: int) -> None:
    """For each worker, rounded down to its own granules."""
    workers = [Worker(place) for place in range(len(BLOCK_SIZES))]
    gateway = Gateway(0)
    for worker in workers:
        gateway.connect(worker)
    for number, prompt in enumerate(computed):
        workers[number % len(workers)].compute(PROMPTS[prompt], keep=False)
    for worker in workers:
        gateway.hear(worker)
    tokens = PROMPTS[asked]
    for worker in workers:
        stride = stride_of(UNIT, worker.block_size)
        keys = column_of(prefix_hashes(ROOT, pack_u32(tokens), stride))
        hits = gateway.index.match(keys, stride, 0.0)
        chain = PrefixChain(ROOT, worker.block_size)
        table = worker.pool.acquire(chain, tokens, len(tokens), max_hit_tokens=len(tokens))
        assert table is not None
        assert hits.get(worker.place, NOTHING).tokens == table.num_hit_tokens // stride * stride


CHAIN = list(range(1, 300))
"""Keys of a prompt of more granules than a byte counts."""


@pytest.mark.slow
@given(st.dictionaries(st.integers(0, 200), st.integers(0, 1 << 30), max_size=24), st.booleans())
def test_columns_of_holdings_say_what_one_worker_alone_has(
    sources: dict[int, int], is_tiered: bool
) -> None:
    """A worker's hit ends at the first granule that it has nowhere; what leads in its pool can be
    sent, and the rest lies where it is fastest. Whoever else has what, and whatever a place had
    before."""
    index, plain = PrefixIndex(1 << 20), dict[int, Hit]()
    for place, seed in sources.items():
        source = random.Random(seed)
        share = source.choice([0.5, 0.995, 1.0])
        tiers = [
            [key for key in CHAIN[: source.randrange(300)] if source.random() < share]
            for _ in (Tier if is_tiered else (Tier.HBM,))
        ]
        index.asked(place)
        index.apply(place, snapshot_of([CHAIN[:7], CHAIN]))
        if seed % 2:
            index.drop(place)
        index.asked(place)
        assert not index.apply(place, snapshot_of(tiers))
        lies = [next((at for at, keys in enumerate(tiers) if key in keys), None) for key in CHAIN]
        lies = lies[: lies.index(None)] if None in lies else lies
        in_pool = next((at for at, tier in enumerate(lies) if tier), len(lies))
        if lies:
            plain[place] = Hit(len(lies), in_pool, lies.count(Tier.DRAM), lies.count(Tier.SSD))
    assert index.match(np.array(CHAIN, np.uint64), 1, 0.0) == plain


def snapshot_of(tiers: list[list[int]]) -> KvChanges:
    """All that a worker has, by tier."""
    changes = [TierChanges(keys, [], len(keys), reduce(xor, keys, 0)) for keys in tiers]
    changes += [TierChanges([], [], 0, 0)] * (len(Tier) - len(changes))
    return KvChanges(True, True, (changes[0], changes[1], changes[2]))
