"""Copies between the KV pool and the tiers below it: blocks go down when nobody uses them any more,
and come back for a prompt that begins with them, beside its wait, where that is quicker than
computing.

``shared/kv/tiers.py`` decides what lies where; this shell has the copies made (``arenas.py``,
``disk_arena.py``). A block goes down, to each tier by itself, only after the step that wrote it is
committed, and is held meanwhile; what comes back goes into new blocks, which are nobody's before
every digest was found right. Whatever goes wrong with a load, the prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol

import structlog

from shared.kv.journal import Journal, Tier, key_of
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import UNIT
from shared.kv.tiers import CachePolicy, SlotTier, WriteBehind
from shared.predict.step_time import PredictStep, attended
from shared.runtime.groups import TaskGroup, plain_errors
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import MovingMean, WorkerMetrics
from shared.worker.arenas import Arena, BlockMove
from shared.worker.request import Loaded, Request

_log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16
"""Blocks that one call copies: frames of transfers wait for the copy thread no longer than that."""

UNKNOWN_LOAD_S = 1.0
LEAST_LOAD_S = 0.05
"""How long a prompt waits for a load of unknown speed, and at least; beyond it is computed."""

FORGET = 0.98
"""What is left of a tier's time for a block each time that a load is passed over for it: slow for a
while is not slow for ever."""


class PrefixWays(Protocol):
    """How a prompt gets KV that the pool does not have."""

    def begin(self, prompt: Request) -> None:
        """A prompt was queued: bring what it begins with, if that is worth while."""
        ...

    def leave(self, prompt: Request) -> None:
        """A prompt has ended."""
        ...


class _Level:
    """One tier of this worker. block_s: what a load took a block."""

    def __init__(self, arena: Arena, policy: CachePolicy, journal: Journal) -> None:
        self.arena = arena
        self.name = arena.tier.name.lower()
        self._journal = journal
        self.tier = SlotTier(arena.num_slots, policy, self._told)
        self.tier.restore(arena.kept)
        self.queue = WriteBehind()
        self.num_told_lost = 0
        self.wake = asyncio.Event()
        self.block_s = MovingMean()

    def _told(self, key: bytes, end: int, is_there: bool) -> None:
        if end % UNIT:
            return
        if is_there:
            self._journal.stored(key_of(key), end, self.arena.tier)
        else:
            self._journal.removed(key_of(key), self.arena.tier)

    def idle(self, block: int) -> None:
        self.queue.idle(block)
        self.wake.set()


class _TierPart(NamedTuple):
    """Blocks of a load that come from one tier: keys from number ``start`` up to ``stop``."""

    level: _Level
    start: int
    stop: int


@dataclass(eq=False)
class _Load:
    """One prefix on its way up, and the prompts that wait for it until then, or have waited.

    table: the pool's blocks of its beginning, and new ones for ``keys``, which lie in ``slots``.
    """

    sequence: TokenSequence
    table: BlockTable
    keys: list[bytes]
    slots: list[int]
    parts: list[_TierPart]
    until: float
    is_awaited: bool = True
    prompts: list[Request] = field(default_factory=list[Request])

    @property
    def num_before(self) -> int:
        """Blocks that the pool had."""
        return len(self.table.blocks) - len(self.keys)


class TierMoves:
    """What lies below one worker's pool; the first of its ``PrefixWays``.

    arenas: the fastest first. others: asked for what is not here. predict: a step's seconds, 0 =
    unknown. on_blocks: some came free. on_end: a prompt waits no longer.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        policy: CachePolicy,
        *,
        pool: BlockPool,
        scheduler: Scheduler,
        journal: Journal,
        metrics: WorkerMetrics,
        predict: PredictStep,
        others: PrefixWays | None,
        on_blocks: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._metrics = metrics
        self._predict = predict
        self._others = others
        self._on_blocks = on_blocks
        self._on_end = on_end
        self.levels = [_Level(arena, policy, journal) for arena in arenas]
        for level in self.levels:
            pool.listen(level.queue)
        pool.when_idle(self._idle)
        self._tasks: asyncio.TaskGroup | None = None
        self._loads: dict[bytes, _Load] = {}  # by the first key that the pool lacked
        self._tables: list[BlockTable] = []

    async def run(self) -> NoReturn:
        """Copy down what becomes idle, and run the loads, until cancelled.

        Raises EngineFailed: a copy failed; the process should end.
        """
        with plain_errors():
            async with TaskGroup() as tasks:
                self._tasks = tasks
                for level in self.levels:
                    tasks.create_task(self._copy_down(level))
                # Here, not at the group's end: when one copier fails no load begins any more.
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._tasks = None
        raise AssertionError  # pragma: no cover

    def close(self) -> None:
        """Let go of memory and files."""
        for level in self.levels:
            level.arena.close()

    # --- down ------------------------------------------------------------------------------------

    def _idle(self, block: int) -> None:
        for level in self.levels:
            level.idle(block)

    async def _copy_down(self, level: _Level) -> NoReturn:
        while True:
            await level.wake.wait()
            level.wake.clear()
            while level.queue and await self._store(level):
                pass

    async def _store(self, level: _Level) -> bool:
        """Copy a few blocks, or rest; False: not now, for somebody needs all the room that there
        is."""
        if self._pool.num_available < BATCH_BLOCKS + self._pool.keep_free_for_newcomers:
            return False
        if rests_s := level.arena.rests_s:
            # Here, not by a timer, of which every block that becomes idle would set one.
            await asyncio.sleep(rests_s)
            return True
        batch = level.queue.take(level.tier, BATCH_BLOCKS)
        lost = self._metrics.tier_lost.labels(level.name)
        lost.inc(level.queue.num_lost - level.num_told_lost)
        level.num_told_lost = level.queue.num_lost
        if not batch:
            await asyncio.sleep(0)  # a long prompt's blocks are many, and mostly there already
            return True
        table = self._pool.hold([event.block for event, _ in batch])
        self._tables.append(table)
        moves = [BlockMove(event.block, slot, event.key, event.end) for event, slot in batch]
        is_written = False
        try:
            is_written = await level.arena.store(moves, lambda: self._release(table))
        finally:
            for move in moves:
                level.tier.end_store(move.key, is_written=is_written)
            self._release(table)
        stored = self._metrics.tier_stored.labels(level.name)
        (stored if is_written else lost).inc(len(moves))
        if not is_written:  # again later, as far as they are still there
            for move in moves:
                level.queue.idle(move.block)
        return True

    def _release(self, table: BlockTable) -> None:
        if table in self._tables:
            self._tables.remove(table)
            self._pool.release(table)
            self._on_blocks()

    # --- up --------------------------------------------------------------------------------------

    def begin(self, prompt: Request) -> None:
        if not self._begin(prompt) and self._others is not None:
            self._others.begin(prompt)

    def leave(self, prompt: Request) -> None:
        """See ``PrefixWays``. A load that has begun goes on: somebody may want it again."""
        if self._others is not None:
            self._others.leave(prompt)

    def _begin(self, prompt: Request) -> bool:
        sequence, pool = prompt.sequence, self._pool
        assert sequence is not None
        if self._tasks is None:
            return False
        size = pool.block_size
        keys = sequence.chain.hashes(sequence.tokens, sequence.most_cached_tokens // size)
        num_before = sequence.num_expected_tokens // size
        rest = keys[num_before:]
        load = self._loads.get(rest[0]) if rest else None
        if load is None or load.keys[: len(rest)] != rest[: len(load.keys)]:
            parts, load_s = self._worth_loading(self._found(rest), num_before)
            if not parts:
                return False
            load = self._start(sequence, rest[: parts[-1].stop], parts, load_s)
            if load is None:
                return False
        load.prompts.append(prompt)
        end = (load.num_before + len(load.keys)) * size
        self._scheduler.await_prefix(sequence, min(end, sequence.most_cached_tokens))
        return True

    def _found(self, keys: Sequence[bytes]) -> list[_TierPart]:
        """Return what of a chain can be loaded, each block from the fastest tier that has it."""
        parts: list[_TierPart] = []
        at = 0
        while True:
            for level in self.levels:
                num = level.tier.num_found(keys, at) if level.arena.can_load else 0
                if num:
                    parts.append(_TierPart(level, at, at + num))
                    at += num
                    break
            else:
                return parts

    def _worth_loading(
        self, parts: list[_TierPart], num_before: int
    ) -> tuple[list[_TierPart], float]:
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

    def _start(
        self, sequence: TokenSequence, keys: list[bytes], parts: list[_TierPart], load_s: float
    ) -> _Load | None:
        """None: the pool has no room for it."""
        pool = self._pool
        assert self._tasks is not None
        num_before = sequence.num_expected_tokens // pool.block_size
        num_tokens = num_before * pool.block_size
        # What the pool has of it may be idle, and counts as available until it is pinned.
        if pool.num_available - len(keys) - num_before < pool.keep_free_for_newcomers:
            return None
        table = pool.pin(sequence.chain, sequence.tokens[:num_tokens])
        if not pool.grow(table, num_tokens + len(keys) * pool.block_size):
            pool.release(table)
            return None
        self._tables.append(table)
        slots: list[int] = []
        for part in parts:
            slots += part.level.tier.begin_load(keys[part.start : part.stop])
        limit_s = max(LEAST_LOAD_S, 2 * load_s) if load_s else UNKNOWN_LOAD_S
        loop = asyncio.get_running_loop()
        load = _Load(sequence, table, keys, slots, parts, loop.time() + limit_s)
        self._loads[keys[0]] = load
        self._tasks.create_task(self._load(load))
        loop.call_at(load.until, self._end_wait, load)
        return load

    async def _load(self, load: _Load) -> None:
        num_before, num_good = load.num_before, 0
        blocks = load.table.blocks[num_before:]
        moves = [
            BlockMove(block, slot, key, (num_before + idx) * self._pool.block_size)
            for idx, (block, slot, key) in enumerate(
                zip(blocks, load.slots, load.keys, strict=True), 1
            )
        ]
        bad: list[bytes] = []
        come = dict.fromkeys(Tier, 0)
        try:
            for part in load.parts:
                # A block is findable only behind its parents: after a gap nothing is worth loading.
                if num_good == part.start:
                    num, is_damaged = await self._load_part(load, part, moves)
                    num_good += num
                    come[part.level.arena.tier] += num * self._pool.block_size
                    bad = [load.keys[num_good]] if is_damaged else []
        finally:
            for level, start, stop in load.parts:
                keys = load.keys[start:stop]
                level.tier.end_load(keys, bad=[key for key in bad if key in keys])
            num_tokens = (num_before + num_good) * self._pool.block_size
            sequence = load.sequence
            self._pool.publish(load.table, sequence.chain, sequence.tokens, num_tokens)
            self._end_wait(load)
            now = asyncio.get_running_loop().time()
            for prompt in load.prompts:
                if prompt.started_at is None:  # also one that was late, but was not let in yet
                    seconds = now - prompt.arrived_at
                    prompt.loaded = Loaded(come[Tier.DRAM], come[Tier.SSD], seconds)
            self._release(load.table)
            # Only now: the release made them idle, and so queued them to go down again.
            for level, start, stop in load.parts:
                level.queue.forget(blocks[start:stop])

    async def _load_part(
        self, load: _Load, part: _TierPart, moves: Sequence[BlockMove]
    ) -> tuple[int, bool]:
        """Return how many blocks came, and whether the next one is damaged."""
        level, at, is_damaged = part.level, part.start, False
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while at < part.stop and not is_damaged:
            batch = moves[at : min(at + BATCH_BLOCKS, part.stop)]
            num, is_damaged = await level.arena.load(batch, load.until)
            at += num
            if num < len(batch):
                break
        num_blocks = at - part.start
        level.block_s.add((loop.time() - began_at) / max(1, num_blocks))
        self._metrics.tier_loaded.labels(level.name).inc(num_blocks * self._pool.block_size)
        if is_damaged:
            self._metrics.tier_damaged.labels(level.name).inc()
            _log.warning("a block of the KV cache is damaged, it is a miss", tier=level.name)
        return num_blocks, is_damaged

    def _end_wait(self, load: _Load) -> None:
        """Its prompts are let in: it has come, has failed, or is late."""
        if not load.is_awaited:
            return
        load.is_awaited = False
        if self._loads.get(load.keys[0]) is load:
            del self._loads[load.keys[0]]
        now = asyncio.get_running_loop().time()
        for prompt in load.prompts:
            assert prompt.sequence is not None
            prompt.loaded = Loaded(seconds=now - prompt.arrived_at)
            self._scheduler.prefix_ended(prompt.sequence)
        self._on_end()

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def token_s(self) -> dict[Tier, float]:
        """Seconds that loads took a token, by tier; 0 = none was seen."""
        return {it.arena.tier: it.block_s.value / self._pool.block_size for it in self.levels}

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return list(self._tables)
