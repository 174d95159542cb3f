"""Copies between the KV pool and memory below it: blocks go down when nobody uses them any more,
and come back for a prompt that begins with them, beside its wait, where that is quicker than
computing.

``shared/kv/tiers.py`` decides what lies where; this shell copies, on the runner's copy thread. A
block goes down only after the step that wrote it is committed, and is held meanwhile; what comes
back goes into new blocks, which are nobody's before every digest was found right. Whatever goes
wrong with a load, the prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import structlog
import xxhash

from shared.engine.base import Engine
from shared.engine.resident import available_bytes
from shared.engine.worker import ComputeRunner
from shared.errors import InvalidRequest
from shared.kv.journal import Journal, Tier, key_of
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import UNIT
from shared.kv.tiers import CachePolicy, SlotTier, WriteBehind
from shared.predict.step_time import PredictStep, attended
from shared.runtime.groups import plain_errors
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import MovingMean, WorkerMetrics
from shared.worker.request import Request

_log = structlog.get_logger(__name__)

BATCH_BLOCKS = 16
"""Blocks that one call copies: frames of transfers wait for the copy thread no longer than that."""

UNKNOWN_LOAD_S = 1.0
LEAST_LOAD_S = 0.05
"""How long a prompt waits for a load of unknown speed, and at least; beyond it is computed."""


class PrefixWays(Protocol):
    """How a prompt gets KV that the pool does not have."""

    def begin(self, prompt: Request) -> None:
        """A prompt was queued: bring what it begins with, if that is worth while."""
        ...

    def leave(self, prompt: Request) -> None:
        """A prompt has ended."""
        ...


class DramArena:
    """Slots of host memory, and of each the digest of what was written to it.

    Raises InvalidRequest: the machine has not so much memory, or not one block fits.
    """

    def __init__(self, engine: Engine, num_bytes: int) -> None:
        self._engine = engine
        self.slot_bytes = engine.block_size * engine.layout.token_bytes
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise InvalidRequest(
                f"dram_cache of {num_bytes} bytes holds not one KV block of {self.slot_bytes}",
                code="dram_cache",
                param="dram_cache",
            )
        available = available_bytes()
        if available is not None and num_bytes > available:
            raise InvalidRequest(
                f"dram_cache of {num_bytes} bytes is more than the {available} bytes that this "
                "machine has left",
                code="dram_cache",
                param="dram_cache",
            )
        self.bytes = np.empty((self.num_slots, self.slot_bytes), np.uint8)
        self._digests = [b""] * self.num_slots

    def store(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks into slots. On the copy thread."""
        for block, slot in moves:
            out = self.bytes[slot]
            self._engine.gather(
                [block], 0, self._engine.block_size, 0, self._engine.layout.num_layers, out
            )
            self._digests[slot] = xxhash.xxh3_128_digest(out)

    def load(self, moves: Sequence[tuple[int, int]]) -> int:
        """Copy slots (the second of each) into blocks, up to the first whose bytes are not those
        that were written; return how many. On the copy thread."""
        for idx, (block, slot) in enumerate(moves):
            data = self.bytes[slot]
            if xxhash.xxh3_128_digest(data) != self._digests[slot]:
                return idx
            self._engine.scatter(
                [block], 0, self._engine.block_size, 0, self._engine.layout.num_layers, data
            )
        return len(moves)


@dataclass(eq=False)
class _Load:
    """One prefix on its way up, and the prompts that wait for it. table: the pool's blocks of its
    beginning, and new ones for ``keys``, which lie in ``slots``."""

    sequence: TokenSequence
    table: BlockTable
    keys: list[bytes]
    slots: list[int]
    waiting: list[TokenSequence] = field(default_factory=list[TokenSequence])

    @property
    def num_before(self) -> int:
        """Blocks that the pool had."""
        return len(self.table.blocks) - len(self.keys)


class TierMoves:
    """The memory below one worker's pool; the first of its ``PrefixWays``.

    others: asked for what is not here. predict: a step's seconds, 0 = unknown. on_blocks: some came
    free. on_end: a prompt waits no longer.
    """

    def __init__(
        self,
        arena: DramArena,
        policy: CachePolicy,
        *,
        compute: ComputeRunner,
        pool: BlockPool,
        scheduler: Scheduler,
        journal: Journal,
        metrics: WorkerMetrics,
        predict: PredictStep,
        others: PrefixWays | None,
        on_blocks: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._compute = compute
        self._pool = pool
        self._scheduler = scheduler
        self._journal = journal
        self._metrics = metrics
        self._predict = predict
        self._others = others
        self._on_blocks = on_blocks
        self._on_end = on_end
        self.tier = SlotTier(arena.num_slots, policy, self._told)
        self.queue = WriteBehind()
        pool.listen(self.queue)
        pool.when_idle(self._idle)
        self._wake = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._loads: dict[bytes, _Load] = {}  # by the first key that the pool lacked
        self._block_s = MovingMean()  # of a load
        self._tables: list[BlockTable] = []

    def _told(self, key: bytes, end: int, is_there: bool) -> None:
        if end % UNIT:
            return
        if is_there:
            self._journal.stored(key_of(key), end, Tier.DRAM)
        else:
            self._journal.removed(key_of(key), Tier.DRAM)

    async def run(self) -> NoReturn:
        """Copy down what becomes idle, and run the loads, until cancelled.

        Raises EngineFailed: a copy failed; the process should end.
        """
        with plain_errors():
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    while True:
                        await self._wake.wait()
                        self._wake.clear()
                        while self.queue and await self._store():
                            pass
                finally:
                    self._tasks = None
        raise AssertionError  # pragma: no cover

    # --- down ------------------------------------------------------------------------------------

    def _idle(self, block: int) -> None:
        self.queue.idle(block)
        self._wake.set()

    async def _store(self) -> bool:
        """Copy a few blocks; False: not now, for somebody needs all the room that there is."""
        if self._pool.num_available < BATCH_BLOCKS + self._pool.keep_free_for_newcomers:
            return False
        batch = self.queue.take(self.tier, BATCH_BLOCKS)
        if not batch:
            return True
        table = self._pool.hold([event.block for event, _ in batch])
        self._tables.append(table)
        moves = [(event.block, slot) for event, slot in batch]
        is_written = False
        try:
            await self._compute.copy(lambda: self._arena.store(moves))
            is_written = True
        finally:
            for event, _ in batch:
                self.tier.end_store(event.key, is_written=is_written)
            self._release(table)
        self._metrics.tier_stored.labels("dram").inc(len(batch))
        return True

    def _release(self, table: BlockTable) -> None:
        self._tables.remove(table)
        self._pool.release(table)
        self._on_blocks()

    # --- up --------------------------------------------------------------------------------------

    def begin(self, prompt: Request) -> None:
        """See ``PrefixWays``."""
        assert prompt.sequence is not None
        if not self._begin(prompt.sequence) and self._others is not None:
            self._others.begin(prompt)

    def leave(self, prompt: Request) -> None:
        """See ``PrefixWays``. A load that has begun goes on: somebody may want it again."""
        if self._others is not None:
            self._others.leave(prompt)

    def _begin(self, sequence: TokenSequence) -> bool:
        pool, chain = self._pool, sequence.chain
        if chain is None or self._tasks is None:
            return False
        size = pool.block_size
        keys = chain.hashes(sequence.tokens, sequence.most_cached_tokens // size)
        num_before = sequence.num_expected_tokens // size
        rest = keys[num_before:]
        found = rest[: self.tier.num_found(rest)]
        if not found:
            return False
        load = self._loads.get(found[0])
        if load is None:
            load_s = self._block_s.value * len(found)
            start, stop = num_before * size, (num_before + len(found)) * size
            compute_s = self._predict(stop - start, attended(start, stop))
            if compute_s and load_s >= compute_s:
                return False
            free = pool.num_available - len(found) - num_before
            if free < pool.keep_free_for_newcomers:
                return False
            table = pool.pin(chain, sequence.tokens[: num_before * size])
            if not pool.grow(table, stop):
                pool.release(table)
                return False
            self._tables.append(table)
            load = _Load(sequence, table, found, self.tier.begin_load(found))
            self._loads[found[0]] = load
            self._tasks.create_task(self._load(load))
            limit_s = max(LEAST_LOAD_S, 2 * load_s) if load_s else UNKNOWN_LOAD_S
            asyncio.get_running_loop().call_later(limit_s, self._end_wait, load)
        load.waiting.append(sequence)
        end = (load.num_before + len(load.keys)) * size
        self._scheduler.await_prefix(sequence, min(end, sequence.most_cached_tokens))
        return True

    async def _load(self, load: _Load) -> None:
        loop = asyncio.get_running_loop()
        num_before, num_good = load.num_before, 0
        moves = list(zip(load.table.blocks[num_before:], load.slots, strict=True))
        bad: list[bytes] = []
        began_at = loop.time()
        try:
            for at in range(0, len(moves), BATCH_BLOCKS):
                part = moves[at : at + BATCH_BLOCKS]
                num_good += await self._compute.copy(lambda part=part: self._arena.load(part))
                if num_good < at + len(part):
                    bad = [load.keys[num_good]]
                    _log.warning("a block of the KV cache in memory is damaged")
                    break
            self._block_s.add((loop.time() - began_at) / max(1, num_good))
        finally:
            self.tier.end_load(load.keys, bad=bad)
            num_tokens = (num_before + num_good) * self._pool.block_size
            sequence = load.sequence
            assert sequence.chain is not None
            self._pool.publish(load.table, sequence.chain, sequence.tokens, num_tokens)
            self._end_wait(load)
            self._release(load.table)
        self._metrics.tier_loaded.labels("dram").inc(num_good * self._pool.block_size)

    def _end_wait(self, load: _Load) -> None:
        """Its prompts are let in: it has come, has failed, or is late."""
        if self._loads.get(load.keys[0]) is load:
            del self._loads[load.keys[0]]
        for sequence in load.waiting:
            self._scheduler.prefix_ended(sequence)
        if load.waiting:
            load.waiting.clear()
            self._on_end()

    # --- looking at it ---------------------------------------------------------------------------

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return list(self._tables)
