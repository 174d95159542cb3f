"""What lies below one simulated worker's pool: what the shell ``shared/worker/tier_moves.py``
performs, on an event heap, and nothing that decides.

Each tier has one queue of copies, whichever way they go; a copy takes its size by the tier's
bandwidth. As with a worker's own, memory is copied from and to the pool's blocks themselves, and a
copy to disk keeps them only until it has begun; what is read from disk is given up when nobody
waits for it any more, and no other is begun before the disk has answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.sim.orders import SimJob, TierSize, WorkerSize
from shared.kv.journal import Journal, Tier
from shared.kv.layout import KvLayout
from shared.kv.tiers import CachePolicy
from shared.worker.core.lower_tiers import LowerTiers, TierLevel, TierLoad, TierStore

if TYPE_CHECKING:
    from services.sim.worker import CoreWorker


class SimLevel(TierLevel):
    """One tier without bytes. is_woken: a block has become idle since nothing was left to copy
    down, or nothing could be."""

    def __init__(
        self,
        size: TierSize,
        block_bytes: int,
        policy: CachePolicy,
        journal: Journal,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(size.kind, size.num_bytes // block_bytes, policy, journal)
        self.is_disk = size.kind is Tier.SSD
        self.is_woken = self.is_storing = False
        self.num_late = 0
        self._copy_s = block_bytes / size.bytes_s
        self._free_at = 0.0
        self._wake = wake

    @property
    def can_load(self) -> bool:
        return not self.num_late

    def idle(self, block: int) -> None:
        super().idle(block)
        self.is_woken = True
        self._wake()

    def copy(self, num_blocks: int, now: float) -> float:
        """Copy so many, behind what is copied; returns when that ends."""
        self._free_at = max(self._free_at, now) + num_blocks * self._copy_s
        return self._free_at

    def late_read_ended(self) -> None:
        """The disk has answered."""
        self.num_late -= 1


_Load = TierLoad[SimLevel, SimJob]


class TierCopies:
    """The tiers of one worker."""

    def __init__(self, worker: CoreWorker, layout: KvLayout, size: WorkerSize) -> None:
        self._worker = worker
        self._clock = worker.clock
        self._is_due = False
        block_bytes = size.block_size * layout.token_bytes
        self.core = LowerTiers[SimLevel, SimJob](
            [
                SimLevel(it, block_bytes, size.cache_policy, worker.journal, self._wake)
                for it in size.tiers
            ],
            pool=worker.pool,
            scheduler=worker.scheduler,
            predict=worker.predict,
        )

    # --- down ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Blocks became idle: they go down behind what this instant does with them."""
        if not self._is_due:
            self._is_due = True
            self._clock.after(0.0, self.copy_down)

    def copy_down(self) -> None:
        """Copy what has become idle, to each tier to which nothing is copied yet."""
        self._is_due = False
        for level in self.core.levels:
            if level.is_woken and not level.is_storing:
                self._store(level)

    def _store(self, level: SimLevel) -> None:
        worker, now = self._worker, self._clock.now
        if not worker.is_alive:
            return
        worker.catch_up()
        store = self.core.next_store(level)
        level.is_storing = store is not None
        if store is None:
            level.is_woken = False
        elif not store.moves:
            self._clock.after(0.0, lambda: self._store(level))
        elif level.is_disk:
            self._clock.after(0.0, lambda: self._begin_write(level, store))
        else:
            ends_at = level.copy(len(store.moves), now)
            self._clock.at(ends_at, lambda: self._stored(level, store))

    def _begin_write(self, level: SimLevel, store: TierStore) -> None:
        worker = self._worker
        if not worker.is_alive:
            return
        worker.catch_up()
        self.core.blocks_read(store)
        ends_at = level.copy(len(store.moves), self._clock.now)
        self._clock.at(ends_at, lambda: self._stored(level, store))
        worker.blocks_freed()

    def _stored(self, level: SimLevel, store: TierStore) -> None:
        worker = self._worker
        if not worker.is_alive:
            return
        worker.catch_up()
        if self.core.blocks_read(store):
            worker.blocks_freed()
        self.core.end_store(level, store, is_written=True)
        self._store(level)

    # --- up --------------------------------------------------------------------------------------

    def begin(self, prompt: SimJob) -> bool:
        """See ``LowerTiers.begin``; returns whether it waits."""
        waits, load = self.core.begin(prompt, self._clock.now)
        if load is not None:
            self._clock.at(load.until, lambda: self._late(load))
            self._copy_up(load)
        return waits

    def _copy_up(self, load: _Load) -> None:
        now = self._clock.now
        batch = self.core.next_batch(load, now)
        if batch is None:
            self._loaded(load)
            return
        level, moves = batch
        ends_at = level.copy(len(moves), now)
        if level.is_disk and ends_at > load.until:
            self._clock.at(load.until, lambda: self._given_up(load, level, ends_at))
        else:
            self._clock.at(ends_at, lambda: self._came(load, len(moves)))

    def _came(self, load: _Load, num_blocks: int) -> None:
        if self._worker.is_alive:
            self.core.batch_ended(load, num_blocks, self._clock.now)
            self._copy_up(load)

    def _given_up(self, load: _Load, level: SimLevel, ends_at: float) -> None:
        level.num_late += 1
        self._clock.at(ends_at, level.late_read_ended)
        self._came(load, 0)

    def _loaded(self, load: _Load) -> None:
        worker = self._worker
        worker.catch_up()
        if self.core.end_load(load, self._clock.now):
            worker.wake()
        self.core.close_load(load)
        worker.blocks_freed()

    def _late(self, load: _Load) -> None:
        worker = self._worker
        if load.is_awaited and worker.is_alive:
            worker.catch_up()
            if self.core.end_wait(load, self._clock.now):
                worker.wake()
