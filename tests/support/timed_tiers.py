"""Tiers below a worker's pool under virtual time: real bytes and files, and copies that take as
long as they are large, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shared.kv.journal import Tier
from shared.worker.arenas import BlocksLoaded
from shared.worker.core.lower_tiers import BlockMove
from tests.support.virtual_compute import VirtualThread

T = TypeVar("T")


class _Queue:
    """Copies of one tier, whichever way. num_blocks: of the one that is begun next."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.num_blocks = 0
        self.free_at = 0.0

    def ends_at(self) -> float:
        """Return when it ends."""
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now) + self.num_blocks * self.block_s
        return self.free_at


class _Copies:
    """The part of a ComputeRunner that memory has its copies made by."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    async def copy(self, work: Callable[[], T]) -> T:
        ends_at = self._queue.ends_at()
        await asyncio.sleep(ends_at - asyncio.get_running_loop().time())
        return work()


class _Thread(VirtualThread):
    """Reads, or writes, of a disk."""

    def __init__(self, queue: _Queue, num_blocks: Callable[[], int]) -> None:
        super().__init__("disk")
        self._queue = queue
        self._num_blocks = num_blocks

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        self._queue.num_blocks = self._num_blocks()
        self._free_at = self._queue.ends_at()
        return super().run(work)


def take_time(arena: Any, block_s: float) -> None:
    """From now on each block that this arena copies takes so long, behind all others."""
    queue = _Queue(block_s)
    num = {"in": 0, "out": 0}
    store, load = arena.store, arena.load

    async def timed_store(moves: Sequence[BlockMove], on_read: Callable[[], None]) -> bool:
        queue.num_blocks = num["out"] = len(moves)
        return await store(moves, on_read)

    async def timed_load(moves: Sequence[BlockMove], until: float) -> BlocksLoaded:
        queue.num_blocks = num["in"] = len(moves)
        return await load(moves, until)

    arena.store, arena.load = timed_store, timed_load
    if arena.tier is Tier.SSD:
        arena._reader = _Thread(queue, lambda: num["in"])
        arena._writer = _Thread(queue, lambda: num["out"])
    else:
        arena._compute = _Copies(queue)
