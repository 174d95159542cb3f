"""The sink's staging slots: windows that the source writes by itself where processes share
memory, else buffers of the engine for whole messages.

A window whose writer is lost is given up for a new one: the old memory may still be written, by a
process that was stopped and goes on, and then nobody reads it. This module knows no frame and no
transfer.
"""

from __future__ import annotations

import numpy as np
import structlog

from shared.engine.base import Buffer, Engine
from shared.engine.memory import staging
from shared.engine.worker import ComputeRunner
from shared.errors import EngineFailed, TransferFailed
from shared.ids import ID_BYTES, RandomBytes
from shared.transfer.messages import WindowOffer
from shared.transport.base import Transport

_log = structlog.get_logger(__name__)


class ReceiveSlots:
    """``num_slots`` buffers of ``num_bytes``, by slot number; there are none before ``open``."""

    def __init__(
        self,
        engine: Engine,
        compute: ComputeRunner,
        transport: Transport,
        num_slots: int,
        num_bytes: int,
        random_bytes: RandomBytes,
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._transport = transport
        self._num_slots = num_slots
        self._num_bytes = num_bytes
        self._random_bytes = random_bytes
        self._windows: dict[int, Buffer] = {}
        self._offers: dict[int, WindowOffer] = {}
        self._plain: staging.StagingSlots | None = None
        self._num_spare = num_slots

    def __getitem__(self, slot: int) -> Buffer:
        return self._windows[slot] if self._plain is None else self._plain[slot]

    @property
    def offers(self) -> list[WindowOffer]:
        """What the source needs to write the slots; empty = only by messages."""
        return list(self._offers.values())

    @property
    def memory(self) -> list[Buffer]:
        """The windows behind ``offers``: who holds them keeps them mappable."""
        return list(self._windows.values())

    async def open(self) -> None:
        """Make every slot: a window if the engine's KV is in host memory and there are any."""
        if not staging.is_on_device(self._engine.new_buffer(1)):
            for slot in range(self._num_slots):
                if not await self._open_window(slot):
                    self.close()
                    break
        if not self._windows:
            self._plain = staging.StagingSlots(self._engine, self._num_slots, self._num_bytes)

    async def replace(self, slot: int, *, is_abandoned: bool) -> WindowOffer | None:
        """Give the slot new memory, as somebody may still write the old; return its offer if it is
        a window.

        is_abandoned: the transport keeps the old memory for ever; as often as there are slots.
        Raises EngineFailed: there is no more memory for it; only a new process helps.
        """
        if self._plain is not None:
            self._plain.replace(slot)
            return None
        if is_abandoned and not self._num_spare:
            raise EngineFailed("the transport gave up on too many buffers", code="staging_leaked")
        self._num_spare -= is_abandoned
        try:
            is_open = await self._open_window(slot)
        except TransferFailed:
            return None  # closed: nothing is received any more
        if not is_open:
            raise EngineFailed("no memory for a staging window", code="staging_leaked")
        _log.info("staging window replaced: its writer was lost", slot=slot)
        return self._offers[slot]

    def close(self) -> None:
        """Let go of all memory, so that the transport can end; nothing is received any more."""
        self._offers.clear()
        self._windows.clear()

    async def _open_window(self, slot: int) -> bool:
        """Put a new window into the slot; False: there is none."""
        window = await self._transport.new_window(self._num_bytes + ID_BYTES)
        if window is None:
            return False
        buffer = np.frombuffer(window.memory, np.uint8)
        offer = WindowOffer(slot, window.key, self._random_bytes(ID_BYTES))

        def prepare() -> None:
            # All of it: its pages are taken now, by this process, and no transfer pays for them.
            buffer.fill(0)
            staging.write(buffer[self._num_bytes :], offer.proof)  # behind all that a frame fills

        await self._compute.copy(prepare)
        self._windows[slot], self._offers[slot] = buffer, offer
        return True
