"""What goes down from a pool, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from shared.errors import InvariantViolated
from shared.kv.journal import Journal, Tier
from shared.kv.tiers import CachePolicy
from shared.schedule.plan import PromptTimes
from shared.schedule.sequence import Sequence
from shared.worker.core.lower_tiers import (
    BATCH_BLOCKS,
    FORGET,
    LEAST_LOAD_S,
    UNKNOWN_LOAD_S,
    Loaded,
    LowerTiers,
    TierLevel,
    TierLoad,
    prompt_times,
)
from shared.worker.core.prefixes import Fetched
from tests.support.cores import Worker, a_sequence

SIZE = 4
PROMPT = tuple(range(1, 42))  # ten blocks, and a token that is computed
NUM_BLOCKS = 32


@dataclass(eq=False)
class Prompt:
    """A prompt that is queued."""

    sequence: Sequence | None
    arrived_at: float = 0.0
    started_at: float | None = None
    fetched: Fetched = field(default_factory=Fetched)
    loaded: Loaded = field(default_factory=Loaded)


class Tiers:
    """A worker with memory and a disk below, by whose clock a token takes a second to compute."""

    def __init__(self, *, dram_slots: int = 64, ssd_slots: int = 64) -> None:
        self.worker = Worker(num_blocks=NUM_BLOCKS, block_size=SIZE)
        journal = Journal(SIZE)
        self.dram = TierLevel(Tier.DRAM, dram_slots, CachePolicy.LRU, journal)
        self.ssd = TierLevel(Tier.SSD, ssd_slots, CachePolicy.LRU, journal)
        self.core = LowerTiers[TierLevel, Prompt](
            [self.dram, self.ssd],
            pool=self.worker.pool,
            scheduler=self.worker.scheduler,
            predict=lambda num_tokens, _: float(num_tokens),
        )

    def copy_down(self, level: TierLevel) -> int:
        """Let all that is queued go down; returns how many blocks did."""
        num = 0
        while (store := self.core.next_store(level)) is not None:
            assert len(store.moves) <= BATCH_BLOCKS
            self.core.end_store(level, store, is_written=True)
            num += len(store.moves)
        return num

    def compute(self, prompt: tuple[int, ...]) -> None:
        self.worker.scheduler.add(a_sequence(prompt, max_tokens=1))
        self.worker.run()

    def evict(self) -> None:
        """Somebody needs every block once."""
        pool = self.worker.pool
        table = pool.acquire(pool.new_chain(), (), NUM_BLOCKS * SIZE, max_hit_tokens=0)
        assert table is not None
        pool.release(table)

    def ask(self, prompt: tuple[int, ...] = PROMPT) -> Prompt:
        sequence = a_sequence(prompt, max_tokens=1)
        self.worker.scheduler.add(sequence)
        return Prompt(sequence)

    def load_all(self, load: TierLoad[TierLevel, Prompt], took_s: float) -> list[Tier]:
        """Let a load come; returns the tiers of its batches."""
        now, kinds = 0.0, list[Tier]()
        while (batch := self.core.next_batch(load, now)) is not None:
            level, moves = batch
            now += took_s
            self.core.batch_ended(load, len(moves), now)
            kinds.append(level.kind)
        assert self.core.end_load(load, now)
        self.core.close_load(load)
        self.check()
        return kinds

    def check(self) -> None:
        pool, core = self.worker.pool, self.core
        core.check_integrity()
        pool.check_integrity([*self.worker.scheduler.tables(), *core.tables()])


def below(**slots: int) -> Tiers:
    """A prompt's blocks lie below the pool, and not in it any more."""
    tiers = Tiers(**slots)
    tiers.compute(PROMPT)
    for level in tiers.core.levels:
        assert tiers.copy_down(level) == min(10, level.tier.num_slots)
    tiers.evict()
    return tiers


def test_what_comes_back_goes_down_again_only_where_it_is_not() -> None:
    """A load from disk is a store to memory, which had room for one of the blocks, and none to
    disk."""
    tiers = below(dram_slots=1)
    prompt = tiers.ask()
    waits, load = tiers.core.begin(prompt, 0.0)
    assert waits
    assert load is not None
    assert tiers.load_all(load, 0.5) == [Tier.DRAM, Tier.SSD]
    assert prompt.loaded == Loaded(4, 36, 1.0)
    assert tiers.ssd.block_s.value == pytest.approx(0.5 / 9)
    assert tiers.core.token_s == {Tier.DRAM: 0.5 / SIZE, Tier.SSD: pytest.approx(0.5 / 36)}
    # The block from memory is in neither's queue for where it lies already.
    assert (len(tiers.dram.queue), len(tiers.ssd.queue)) == (9, 1)
    assert tiers.worker.pool.num_cached_tokens(tiers.worker.pool.new_chain(), PROMPT, 40) == 40


def test_who_asks_for_what_is_on_its_way_waits_for_it() -> None:
    """One load for both; and none once it was late, or had come."""
    tiers = below()
    first, second = tiers.ask(), tiers.ask()
    (_, load), (waits, other) = (tiers.core.begin(it, 0.0) for it in (first, second))
    assert load is not None
    assert (waits, other) == (True, None)
    assert load.until == UNKNOWN_LOAD_S
    assert tiers.core.end_wait(load, 1.0)
    assert not tiers.core.end_wait(load, 1.0)
    assert all(it.sequence and not it.sequence.awaits_prefix for it in (first, second))
    assert first.loaded == Loaded(seconds=1.0)
    second.started_at = 1.0
    assert tiers.core.next_batch(load, 1.0) is not None
    tiers.core.batch_ended(load, 10, 2.0)
    assert not tiers.core.end_load(load, 2.0)
    tiers.core.close_load(load)
    # The first was not let in yet, and has it after all.
    assert (first.loaded, second.loaded) == (Loaded(40, 0, 2.0), Loaded(seconds=1.0))
    assert tiers.core.begin(tiers.ask(), 3.0) == (False, None)
    tiers.check()


def test_a_gap_ends_a_load() -> None:
    """What came before a block that is damaged is used, and what lies behind it, also in another
    tier, is not asked for; the damaged one is gone."""
    tiers = below()
    keys = tiers.worker.pool.new_chain().hashes(PROMPT, 10)
    tiers.dram.tier.begin_load(keys[6:])
    tiers.dram.tier.end_load(keys[6:], bad=keys[6:])
    _, load = tiers.core.begin(tiers.ask(), 0.0)
    assert load is not None
    assert [(part.level, part.start, part.stop) for part in load.parts] == [
        (tiers.dram, 0, 6),
        (tiers.ssd, 6, 10),
    ]
    level, moves = tiers.core.next_batch(load, 0.0) or (None, ())
    assert (level, len(moves)) == (tiers.dram, 6)
    tiers.core.batch_ended(load, 3, 0.3, is_damaged=True)
    assert tiers.core.next_batch(load, 0.3) is None
    tiers.core.end_load(load, 0.3)
    tiers.core.close_load(load)
    tiers.check()
    assert (tiers.dram.tier.num_found(keys), tiers.ssd.tier.num_found(keys)) == (3, 10)
    assert tiers.worker.pool.num_cached_tokens(tiers.worker.pool.new_chain(), PROMPT, 40) == 12


@pytest.mark.parametrize(
    ("dram_s", "ssd_s", "is_worth", "until"),
    [(0.1, 0.1, True, 2.0), (4.1, 0.1, False, 0.0), (1e-4, 9.0, True, LEAST_LOAD_S)],
)
def test_only_what_is_quicker_than_computing_is_loaded(
    dram_s: float, ssd_s: float, is_worth: bool, until: float
) -> None:
    """Twice as long as it should take is waited for it, and for a moment at least; a tier that was
    slow is believed a little less each time that it is passed over."""
    tiers = below()
    tiers.dram.block_s.add(dram_s)
    tiers.ssd.block_s.add(ssd_s)
    waits, load = tiers.core.begin(tiers.ask(), 0.0)
    assert waits is is_worth
    assert (0.0 if load is None else load.until) == pytest.approx(until)
    assert tiers.dram.block_s.value == pytest.approx(dram_s if is_worth else dram_s * FORGET)


def test_nothing_is_copied_while_somebody_needs_the_room() -> None:
    """Blocks that are copied cannot be given out: whoever waits for room comes first, and a prompt
    for which there is none is computed."""
    tiers = below()
    tiers.compute(PROMPT[:33])
    pool = tiers.worker.pool
    pool.claim(NUM_BLOCKS - BATCH_BLOCKS + 1)
    assert tiers.core.next_store(tiers.dram) is None
    assert tiers.core.begin(tiers.ask(PROMPT[1:]), 0.0) == (False, None)
    pool.claim(NUM_BLOCKS - 2)
    assert tiers.core.begin(tiers.ask(), 0.0) == (False, None)
    pool.claim(0)
    store = tiers.core.next_store(tiers.dram)
    assert store is not None
    tiers.check()


def test_what_was_not_written_goes_again() -> None:
    """And its slots are free meanwhile; blocks are let go once."""
    tiers = Tiers()
    tiers.compute(PROMPT)
    store = tiers.core.next_store(tiers.ssd)
    assert store is not None
    assert tiers.core.blocks_read(store)
    assert not tiers.core.end_store(tiers.ssd, store, is_written=False)
    tiers.check()
    assert (len(tiers.ssd.tier), tiers.copy_down(tiers.ssd)) == (0, 10)


def test_what_came_and_went_again_is_not_told() -> None:
    """Tokens of a prompt that were not computed lay in one place each."""
    sequence = a_sequence(8)
    sequence.num_cached_tokens = 6
    prompt = Prompt(sequence, 1.0, 2.0, Fetched(5, 0.5, 99), Loaded(4, 4, 0.25))
    told = PromptTimes(1.0, 2.0, 6, 2, 0.5, 99, 4, 2, 0.25)
    assert prompt_times(prompt, 4.0) == told
    prompt.started_at = None
    assert prompt_times(prompt, 4.0) == told._replace(queue_s=0.0, compute_s=3.0)


def test_slots_that_are_none_are_noticed() -> None:
    """A worker's own check sees what lies in each of its tiers."""
    tiers = below()
    tiers.ssd.tier._free.append(64)
    with pytest.raises(InvariantViolated):
        tiers.core.check_integrity()
