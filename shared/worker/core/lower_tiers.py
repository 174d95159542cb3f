"""What lies below one worker's KV pool, in memory and on disk: which blocks go down, which come
back for whom, and who waits for them. Pure.

A block goes down, to each tier by itself, when nobody uses it any more, and is held meanwhile; what
comes back goes into new blocks, which are nobody's before every one of them is proved. Which slot
of a tier is whose, and who gives way there, ``shared/kv/tiers.py`` knows. Copies are made by
whoever asks: by the worker's shell (``shared/worker/tier_moves.py``), or by nobody, in the
simulator (``services/sim/tier_copies.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from shared.errors import InvariantViolated
from shared.kv.journal import Journal, Tier, key_of
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import UNIT
from shared.kv.tiers import CachePolicy, SlotTier, WriteBehind
from shared.predict.moving_mean import MovingMean
from shared.predict.step_time import PredictStep, attended
from shared.schedule.plan import PromptTimes
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.worker.core.prefixes import Fetched

BATCH_BLOCKS = 16
"""Blocks that one call copies: frames of transfers wait for the copy thread no longer than that."""

UNKNOWN_LOAD_S = 1.0
LEAST_LOAD_S = 0.05
"""How long a prompt waits for a load of unknown speed, and at least; beyond it is computed."""

FORGET = 0.98
"""What is left of a tier's time for a block each time that a load is passed over for it: slow for a
while is not slow for ever."""


class BlockMove(NamedTuple):
    """A block of the pool and a slot of a tier, and the prefix whose KV goes from one to the other:
    its key, and its number of tokens."""

    block: int
    slot: int
    key: bytes
    end: int


class Loaded(NamedTuple):
    """What came of a prefix that lies below the pool: so many tokens from either tier, and how long
    the prompt waited for them."""

    dram_tokens: int = 0
    ssd_tokens: int = 0
    seconds: float = 0.0


class WaitingPrompt(Protocol):
    """A prompt that is queued. started_at: its first step was planned; None = not yet. fetched,
    loaded: what came from other workers' caches, and from below the pool."""

    sequence: TokenSequence | None
    started_at: float | None
    fetched: Fetched
    loaded: Loaded

    @property
    def arrived_at(self) -> float: ...


PromptT = TypeVar("PromptT", bound=WaitingPrompt)


def prompt_times(prompt: WaitingPrompt, now: float) -> PromptTimes:
    """Return what a prompt took whose token 1 is sampled now."""
    arrived_at, loaded, fetched = prompt.arrived_at, prompt.loaded, prompt.fetched
    started_at = arrived_at if prompt.started_at is None else prompt.started_at
    cached_tokens = 0 if prompt.sequence is None else prompt.sequence.num_cached_tokens
    # What had come may have gone again before the prompt was let in.
    dram_tokens = min(loaded.dram_tokens, cached_tokens)
    return PromptTimes(
        queue_s=started_at - arrived_at,
        compute_s=now - started_at,
        cached_tokens=cached_tokens,
        dram_tokens=dram_tokens,
        ssd_tokens=min(loaded.ssd_tokens, cached_tokens - dram_tokens),
        load_s=loaded.seconds,
        fetched_tokens=min(fetched.num_tokens, cached_tokens - dram_tokens),
        fetch_s=fetched.seconds,
        fetched_bytes=fetched.num_bytes,
    )


class TierLevel:
    """One tier of this worker, and what is to go there. block_s: what a load took a block."""

    def __init__(self, kind: Tier, num_slots: int, policy: CachePolicy, journal: Journal) -> None:
        self.kind = kind
        self._journal = journal
        self.tier = SlotTier(num_slots, policy, self._told)
        self.queue = WriteBehind()
        self.block_s = MovingMean()

    @property
    def can_load(self) -> bool:
        """Whether a load may begin."""
        return True

    def idle(self, block: int) -> None:
        """Nobody holds this block any more: see ``LowerTiers.next_store``."""
        self.queue.idle(block)

    def _told(self, key: bytes, end: int, is_there: bool) -> None:
        if end % UNIT:
            return
        if is_there:
            self._journal.stored(key_of(key), end, self.kind)
        else:
            self._journal.removed(key_of(key), self.kind)


LevelT = TypeVar("LevelT", bound=TierLevel)


class TierPart(NamedTuple, Generic[LevelT]):
    """Blocks of a load that come from one tier: those from number ``start`` up to ``stop``."""

    level: LevelT
    start: int
    stop: int


@dataclass(eq=False)
class TierStore:
    """Blocks on their way down; none = of those that were looked at none has to go. table: what is
    held of the pool until they are read."""

    moves: list[BlockMove]
    table: BlockTable | None


@dataclass(eq=False)
class TierLoad(Generic[LevelT, PromptT]):
    """One prefix on its way up, and the prompts that wait for it until then, or have waited.

    table: the pool's blocks of its beginning, and new ones for ``moves``. until: when its prompts
    wait no longer. num_good: blocks that have come, from the first on. bad: a key whose bytes were
    not those that were written.
    """

    sequence: TokenSequence
    table: BlockTable
    moves: list[BlockMove]
    parts: list[TierPart[LevelT]]
    until: float
    is_awaited: bool = True
    prompts: list[PromptT] = field(default_factory=list[PromptT])
    num_good: int = 0
    bad: bytes | None = None
    come: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    place: int = 0
    part_began_at: float = 0.0

    @property
    def keys(self) -> list[bytes]:
        return [move.key for move in self.moves]

    @property
    def num_before(self) -> int:
        """Blocks that the pool had."""
        return len(self.table.blocks) - len(self.moves)


class LowerTiers(Generic[LevelT, PromptT]):
    """What lies below one worker's pool. levels: the fastest first. predict: a step's seconds, 0 =
    unknown."""

    def __init__(
        self,
        levels: Sequence[LevelT],
        *,
        pool: BlockPool,
        scheduler: Scheduler,
        predict: PredictStep,
    ) -> None:
        self.levels = levels
        self._pool = pool
        self._scheduler = scheduler
        self._predict = predict
        for level in levels:
            pool.listen(level.queue)
        pool.when_idle(self._idle)
        self._loads: dict[bytes, TierLoad[LevelT, PromptT]] = {}  # by the first key it brings
        self._tables: list[BlockTable] = []

    # --- down ------------------------------------------------------------------------------------

    def _idle(self, block: int) -> None:
        for level in self.levels:
            level.idle(block)

    def next_store(self, level: LevelT) -> TierStore | None:
        """Return what is to be copied down to a tier next; if that is nothing, ask again. None: not
        before another block becomes idle, for none is left, or somebody needs all the room that
        there is."""
        pool = self._pool
        if not level.queue or pool.num_available < BATCH_BLOCKS + pool.keep_free_for_newcomers:
            return None
        batch = level.queue.take(level.tier, BATCH_BLOCKS)
        table = None
        if batch:
            table = pool.hold([event.block for event, _ in batch])
            self._tables.append(table)
        moves = [BlockMove(event.block, slot, event.key, event.end) for event, slot in batch]
        return TierStore(moves, table)

    def blocks_read(self, store: TierStore) -> bool:
        """Its blocks are needed no longer. Allowed twice; returns whether that lets them go."""
        table, store.table = store.table, None
        if table is not None:
            self._let_go(table)
        return table is not None

    def end_store(self, level: LevelT, store: TierStore, *, is_written: bool) -> bool:
        """The copy is over; what was not written goes again later, as far as it is still there.
        Returns whether blocks were let go."""
        for move in store.moves:
            level.tier.end_store(move.key, is_written=is_written)
        lets_go = self.blocks_read(store)
        for move in () if is_written else store.moves:
            level.queue.idle(move.block)
        return lets_go

    def _let_go(self, table: BlockTable) -> None:
        self._tables.remove(table)
        self._pool.release(table)

    # --- up --------------------------------------------------------------------------------------

    def begin(self, prompt: PromptT, now: float) -> tuple[bool, TierLoad[LevelT, PromptT] | None]:
        """Have a queued prompt wait for what lies below the pool, if that is worth while. Returns
        whether it does, and the load that this begins, if no other brings the same."""
        sequence, size, new = prompt.sequence, self._pool.block_size, None
        assert sequence is not None
        keys = sequence.chain.hashes(sequence.tokens, sequence.most_cached_tokens // size)
        num_before = sequence.num_expected_tokens // size
        rest = keys[num_before:]
        load = self._loads.get(rest[0]) if rest else None
        if load is None or load.keys[: len(rest)] != rest[: len(load.moves)]:
            parts, load_s = self._worth_loading(self._found(rest), num_before)
            if not parts:
                return False, None
            load = new = self._new(sequence, rest[: parts[-1].stop], parts, load_s, now)
            if load is None:
                return False, None
        load.prompts.append(prompt)
        end = (load.num_before + len(load.moves)) * size
        self._scheduler.await_prefix(sequence, min(end, sequence.most_cached_tokens))
        return True, new

    def _found(self, keys: Sequence[bytes]) -> list[TierPart[LevelT]]:
        """Return what of a chain can be loaded, each block from the fastest tier that has it."""
        parts: list[TierPart[LevelT]] = []
        at = 0
        while True:
            for level in self.levels:
                num = level.tier.num_found(keys, at) if level.can_load else 0
                if num:
                    parts.append(TierPart(level, at, at + num))
                    at += num
                    break
            else:
                return parts

    def _worth_loading(
        self, parts: list[TierPart[LevelT]], num_before: int
    ) -> tuple[list[TierPart[LevelT]], float]:
        """Return the first parts, as many as make the prompt begin soonest, and the seconds that
        their load takes, 0 = unknown."""
        size = self._pool.block_size
        best_s, best, best_load_s, load_s = 0.0, 0, 0.0, 0.0
        is_known = True
        for idx, part in enumerate(parts, 1):
            load_s += part.level.block_s.value * (part.stop - part.start)
            is_known = is_known and part.level.block_s.value > 0
            start, stop = num_before * size, (num_before + part.stop) * size
            compute_s = self._predict(stop - start, attended(start, stop))
            if not compute_s or compute_s - load_s > best_s:
                best_s, best, best_load_s = compute_s - load_s, idx, load_s if is_known else 0.0
        for part in parts[best:]:
            part.level.block_s.value *= FORGET
        return parts[:best], best_load_s

    def _new(
        self,
        sequence: TokenSequence,
        keys: list[bytes],
        parts: list[TierPart[LevelT]],
        load_s: float,
        now: float,
    ) -> TierLoad[LevelT, PromptT] | None:
        """None: the pool has no room for it."""
        pool = self._pool
        size = pool.block_size
        num_before = sequence.num_expected_tokens // size
        num_tokens = num_before * size
        # What the pool has of it may be idle, and counts as available until it is pinned.
        if pool.num_available - len(keys) - num_before < pool.keep_free_for_newcomers:
            return None
        table = pool.pin(sequence.chain, sequence.tokens[:num_tokens])
        if not pool.grow(table, num_tokens + len(keys) * size):
            pool.release(table)
            return None
        self._tables.append(table)
        slots: list[int] = []
        for part in parts:
            slots += part.level.tier.begin_load(keys[part.start : part.stop])
        blocks: array[int] = table.blocks[-len(keys) :]
        ends = range(num_tokens + size, num_tokens + (len(keys) + 1) * size, size)
        moves = list(map(BlockMove, blocks, slots, keys, ends))
        limit_s = max(LEAST_LOAD_S, 2 * load_s) if load_s else UNKNOWN_LOAD_S
        load = TierLoad[LevelT, PromptT](sequence, table, moves, parts, now + limit_s)
        self._loads[keys[0]] = load
        return load

    def next_batch(
        self, load: TierLoad[LevelT, PromptT], now: float
    ) -> tuple[LevelT, Sequence[BlockMove]] | None:
        """Return which blocks are to be copied up next, from which tier; None = no more are."""
        if load.place == len(load.parts):
            return None
        level, start, stop = load.parts[load.place]
        if load.num_good == start:
            load.part_began_at = now
        return level, load.moves[load.num_good : min(load.num_good + BATCH_BLOCKS, stop)]

    def batch_ended(
        self,
        load: TierLoad[LevelT, PromptT],
        num_blocks: int,
        now: float,
        *,
        is_damaged: bool = False,
    ) -> None:
        """So many of the batch's blocks came, from the first on. is_damaged: the next one is not
        what was once written there."""
        level, start, stop = load.parts[load.place]
        num_asked = min(BATCH_BLOCKS, stop - load.num_good)
        load.num_good += num_blocks
        load.come[level.kind] += num_blocks * self._pool.block_size
        if is_damaged:
            load.bad = load.moves[load.num_good].key
        is_cut = num_blocks < num_asked
        if is_cut or load.num_good == stop:
            level.block_s.add((now - load.part_began_at) / max(1, load.num_good - start))
            # A block is findable only behind its parents: after a gap nothing is worth loading.
            load.place = len(load.parts) if is_cut else load.place + 1

    def end_load(self, load: TierLoad[LevelT, PromptT], now: float) -> bool:
        """No block of it is written any more: what came is findable from now on. Returns what
        ``end_wait`` does. ``close_load`` is to follow."""
        for level, start, stop in load.parts:
            keys = load.keys[start:stop]
            level.tier.end_load(keys, bad=[key for key in keys if key == load.bad])
        num_tokens = (load.num_before + load.num_good) * self._pool.block_size
        sequence = load.sequence
        self._pool.publish(load.table, sequence.chain, sequence.tokens, num_tokens)
        ends_wait = self.end_wait(load, now)
        for prompt in load.prompts:
            if prompt.started_at is None:  # also one that was late, but was not let in yet
                seconds = now - prompt.arrived_at
                prompt.loaded = Loaded(load.come[Tier.DRAM], load.come[Tier.SSD], seconds)
        return ends_wait

    def close_load(self, load: TierLoad[LevelT, PromptT]) -> None:
        """Let its blocks go."""
        blocks = load.table.blocks[load.num_before :]
        self._let_go(load.table)
        # Only now: that made them idle, and so queued them to go down again.
        for level, start, stop in load.parts:
            level.queue.forget(blocks[start:stop])

    def end_wait(self, load: TierLoad[LevelT, PromptT], now: float) -> bool:
        """Its prompts are let in: it has come, has failed, or is late. Allowed twice; returns
        whether it was the first time."""
        if not load.is_awaited:
            return False
        load.is_awaited = False
        if self._loads.get(load.moves[0].key) is load:
            del self._loads[load.moves[0].key]
        for prompt in load.prompts:
            assert prompt.sequence is not None
            prompt.loaded = Loaded(seconds=now - prompt.arrived_at)
            self._scheduler.prefix_ended(prompt.sequence)
        return True

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def token_s(self) -> dict[Tier, float]:
        """Seconds that loads took a token, by tier; 0 = none was seen."""
        return {it.kind: it.block_s.value / self._pool.block_size for it in self.levels}

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return list(self._tables)

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every slot of every tier is accounted for, and nothing
        waits for a load that is over."""
        for level in self.levels:
            level.tier.check_integrity()
        if any(not load.is_awaited for load in self._loads.values()):
            raise InvariantViolated("a prompt could wait for a load that is over")
