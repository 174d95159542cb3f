"""Copies between the KV pool and the tiers below it: blocks go down when nobody uses them any more,
and come back for a prompt that begins with them, beside its wait, where that is quicker than
computing.

``core/lower_tiers.py`` decides what goes where, and for whom; this shell has the copies made
(``arenas.py``, ``disk_arena.py``). A block goes down only after the step that wrote it is
committed; what comes back goes into new blocks, which are nobody's before every digest was found
right. Whatever goes wrong with a load, the prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

import structlog

from shared.kv.journal import Journal, Tier
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.tiers import CachePolicy
from shared.predict.step_time import PredictStep
from shared.runtime.groups import TaskGroup, plain_errors
from shared.runtime.loops import loop_time
from shared.schedule.scheduler import Scheduler
from shared.telemetry.worker import WorkerMetrics
from shared.worker.arenas import Arena
from shared.worker.core.lower_tiers import LowerTiers, TierLevel, TierLoad, TierStore
from shared.worker.prefixes import PrefixFetches
from shared.worker.request import Request

_log = structlog.get_logger(__name__)


class _Level(TierLevel):
    """One tier with its bytes."""

    def __init__(self, arena: Arena, policy: CachePolicy, journal: Journal) -> None:
        super().__init__(arena.tier, arena.num_slots, policy, journal)
        self.tier.restore(arena.kept)
        self.arena = arena
        self.name = arena.tier.name.lower()
        self.num_told_lost = 0
        self.wake = asyncio.Event()

    @property
    def can_load(self) -> bool:
        return self.arena.can_load

    def idle(self, block: int) -> None:
        super().idle(block)
        self.wake.set()


_Load = TierLoad[_Level, Request]


class TierMoves:
    """What lies below one worker's pool; asked first for what a prompt begins with.

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
        others: PrefixFetches | None,
        on_blocks: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._block_size = pool.block_size
        self._metrics = metrics
        self._others = others
        self._on_blocks = on_blocks
        self._on_end = on_end
        self.levels = [_Level(arena, policy, journal) for arena in arenas]
        self._core = LowerTiers[_Level, Request](
            self.levels, pool=pool, scheduler=scheduler, predict=predict
        )
        self._tasks: asyncio.TaskGroup | None = None

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

    async def _copy_down(self, level: _Level) -> NoReturn:
        while True:
            await level.wake.wait()
            level.wake.clear()
            while level.queue:
                if rests_s := level.arena.rests_s:
                    # Here, not by a timer, of which every block that becomes idle would set one.
                    await asyncio.sleep(rests_s)
                    continue
                store = self._core.next_store(level)
                if store is None:
                    break
                self._count_lost(level)
                if store.moves:
                    await self._store(level, store)
                else:  # a long prompt's blocks are many, and mostly there already
                    await asyncio.sleep(0)

    def _count_lost(self, level: _Level) -> None:
        lost = self._metrics.tier_lost.labels(level.name)
        lost.inc(level.queue.num_lost - level.num_told_lost)
        level.num_told_lost = level.queue.num_lost

    async def _store(self, level: _Level, store: TierStore) -> None:
        def blocks_read() -> None:
            if self._core.blocks_read(store):
                self._on_blocks()

        is_written = False
        try:
            is_written = await level.arena.store(store.moves, blocks_read)
        finally:
            if self._core.end_store(level, store, is_written=is_written):
                self._on_blocks()
        counter = self._metrics.tier_stored if is_written else self._metrics.tier_lost
        counter.labels(level.name).inc(len(store.moves))

    # --- up --------------------------------------------------------------------------------------

    def begin(self, prompt: Request) -> None:
        """A prompt was queued: bring what it begins with, if that is worth while."""
        waits = False
        if self._tasks is not None:
            waits, load = self._core.begin(prompt, loop_time())
            if load is not None:
                self._tasks.create_task(self._load(load))
                asyncio.get_running_loop().call_at(load.until, self._late, load)
        if not waits and self._others is not None:
            self._others.begin(prompt)

    def leave(self, prompt: Request) -> None:
        """A prompt has ended. A load that has begun goes on: somebody may want it again."""
        if self._others is not None:
            self._others.leave(prompt)

    async def _load(self, load: _Load) -> None:
        try:
            while (batch := self._core.next_batch(load, loop_time())) is not None:
                level, moves = batch
                num, is_damaged = await level.arena.load(moves, load.until)
                self._core.batch_ended(load, num, loop_time(), is_damaged=is_damaged)
                self._metrics.tier_loaded.labels(level.name).inc(num * self._block_size)
                if is_damaged:
                    self._metrics.tier_damaged.labels(level.name).inc()
                    _log.warning(
                        "a block of the KV cache is damaged, it is a miss", tier=level.name
                    )
        finally:
            if self._core.end_load(load, loop_time()):
                self._on_end()
            self._core.close_load(load)
            self._on_blocks()

    def _late(self, load: _Load) -> None:
        if self._core.end_wait(load, loop_time()):
            self._on_end()

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def token_s(self) -> dict[Tier, float]:
        """Seconds that loads took a token, by tier; 0 = none was seen."""
        return self._core.token_s

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return self._core.tables()

    def check_integrity(self) -> None:
        """See ``LowerTiers``."""
        self._core.check_integrity()
