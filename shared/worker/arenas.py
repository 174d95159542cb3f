"""What tiers below the pool have in common: places for blocks, and copies between the two.

An arena moves bytes and proves them; which slot is whose, ``core/lower_tiers.py`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from shared.engine.base import Engine
from shared.engine.memory.resident import available_bytes
from shared.engine.worker import ComputeRunner
from shared.errors import InvalidRequest
from shared.kv.journal import Tier
from shared.worker.core.lower_tiers import BlockMove


class BlocksLoaded(NamedTuple):
    """How many blocks came, from the first on, and whether the next one was not what was once
    written there."""

    num_blocks: int
    is_damaged: bool = False


class Arena(Protocol):
    """Slots of one tier. kept: slot, key and tokens of what is there from before."""

    tier: Tier
    num_slots: int
    kept: Sequence[tuple[int, bytes, int]]

    @property
    def rests_s(self) -> float:
        """Seconds for which nothing is to be stored."""
        ...

    @property
    def can_load(self) -> bool:
        """Whether a load may begin."""
        ...

    async def store(self, moves: Sequence[BlockMove], on_read: Callable[[], None]) -> bool:
        """Copy blocks into slots; False: they are not there. on_read: the blocks are no longer
        needed."""
        ...

    async def load(self, moves: Sequence[BlockMove], until: float) -> BlocksLoaded:
        """Copy slots into blocks, up to the first that is damaged.

        until: loop time after which nothing need be begun any more. When this returns, no block is
        written any more. It is cancelled only with the worker: nobody takes the blocks after that.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds; returns at once."""
        ...


def slots_of(num_bytes: int, engine: Engine, setting: str) -> int:
    """Return how many slots so much memory has. Raises InvalidRequest: not one."""
    slot_bytes = engine.block_size * engine.layout.token_bytes
    if num_bytes < slot_bytes:
        raise InvalidRequest(
            f"--{setting.replace('_', '-')} of {num_bytes} bytes holds not one KV block of "
            f"{slot_bytes}: give more, or leave it out",
            code=setting,
            param=setting,
        )
    return num_bytes // slot_bytes


def gather(engine: Engine, block: int, out: np.ndarray) -> None:
    """Copy all layers of a block into a slot. On the copy thread."""
    engine.gather([block], 0, engine.block_size, 0, engine.layout.num_layers, out)


def scatter(engine: Engine, block: int, data: np.ndarray) -> None:
    """Copy a slot into all layers of a block. On the copy thread."""
    engine.scatter([block], 0, engine.block_size, 0, engine.layout.num_layers, data)


class DramArena:
    """Slots of host memory, and of each the digest of what was written to it.

    Raises InvalidRequest: the machine has not so much memory, or not one block fits.
    """

    tier = Tier.DRAM
    kept: Sequence[tuple[int, bytes, int]] = ()
    rests_s = 0.0
    can_load = True

    def __init__(self, engine: Engine, compute: ComputeRunner, num_bytes: int) -> None:
        self._engine = engine
        self._compute = compute
        self.num_slots = slots_of(num_bytes, engine, "dram_cache")
        available = available_bytes()
        if available is not None and num_bytes > available:
            raise InvalidRequest(
                f"--dram-cache of {num_bytes} bytes is more than the {available} bytes that this "
                "machine has left: give less, for each worker that shares it",
                code="dram_cache",
                param="dram_cache",
            )
        slot_bytes = engine.block_size * engine.layout.token_bytes
        self.bytes = np.empty((self.num_slots, slot_bytes), np.uint8)
        engine.page_lock(self.bytes)
        self._digests = [b""] * self.num_slots

    async def store(self, moves: Sequence[BlockMove], on_read: Callable[[], None]) -> bool:
        await self._compute.copy(lambda: self._store(moves))
        on_read()
        return True

    def _store(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            out = self.bytes[move.slot]
            gather(self._engine, move.block, out)
            self._digests[move.slot] = xxhash.xxh3_128_digest(out)

    async def load(self, moves: Sequence[BlockMove], until: float) -> BlocksLoaded:
        """See ``Arena``. What has begun is waited for."""
        num_blocks = await self._compute.copy(lambda: self._load(moves))
        return BlocksLoaded(num_blocks, num_blocks < len(moves))

    def _load(self, moves: Sequence[BlockMove]) -> int:
        for idx, move in enumerate(moves):
            data = self.bytes[move.slot]
            if xxhash.xxh3_128_digest(data) != self._digests[move.slot]:
                return idx
            scatter(self._engine, move.block, data)
        return len(moves)

    def close(self) -> None:
        """See ``Arena``."""
