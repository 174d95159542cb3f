"""Decode's staging slots: windows that prefill writes by itself where processes share memory, else
buffers of the engine for whole messages.

A window whose writer is lost is given up for a new one: the old memory may still be written, by a
process that was stopped and goes on, and then nobody reads it. This module knows no frame and no
transfer.
"""

from __future__ import annotations

import numpy as np
import structlog

from shared.engine import staging
from shared.engine.base import Buffer, Engine
from shared.errors import EngineFailed, TransferFailed
from shared.ids import ID_BYTES, RandomBytes
from shared.transfer.messages import WindowOffer
from shared.transport.base import Transport, Window

_log = structlog.get_logger(__name__)


class ReceiveSlots:
    """``num_slots`` buffers of ``num_bytes``, by slot number."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        num_slots: int,
        num_bytes: int,
        random_bytes: RandomBytes,
    ) -> None:
        self._buffers = staging.StagingSlots(engine, num_slots, num_bytes)
        self._transport = transport
        self._num_slots = num_slots
        self._num_bytes = num_bytes
        self._random_bytes = random_bytes
        self._offers: dict[int, WindowOffer] = {}

    def __getitem__(self, slot: int) -> Buffer:
        return self._buffers[slot]

    @property
    def offers(self) -> list[WindowOffer]:
        """What prefill needs to write the slots; empty = only by messages."""
        return list(self._offers.values())

    async def open_windows(self) -> None:
        """Make every slot a window, if there are any and the engine's KV is in host memory."""
        if staging.is_on_device(self._buffers[0]):
            return
        for slot in range(self._num_slots):
            if (window := await self._new_window()) is None:
                self._offers.clear()
                return
            self._take(slot, window)

    async def replace(self, slot: int) -> WindowOffer | None:
        """Give the slot new memory, as somebody may still write the old; return its offer if it is
        a window.

        Raises EngineFailed: there is no more memory for it; only a new process helps.
        """
        if slot not in self._offers:
            self._buffers.replace(slot)
            return None
        try:
            window = await self._new_window()
        except TransferFailed:
            return None  # closed: nothing is received any more
        if window is None:
            raise EngineFailed("no memory for a staging window", code="staging_leaked")
        _log.info("staging window replaced: its writer was lost", slot=slot)
        return self._take(slot, window)

    async def _new_window(self) -> Window | None:
        return await self._transport.new_window(self._num_bytes + ID_BYTES)

    def close(self) -> None:
        """Let go of all memory, so that the transport can end; nothing is received any more."""
        self._offers.clear()
        for slot in range(self._num_slots):
            self._buffers.put(slot, b"")

    def _take(self, slot: int, window: Window) -> WindowOffer:
        buffer = np.frombuffer(window.memory, np.uint8)
        offer = WindowOffer(slot, window.key, self._random_bytes(ID_BYTES))
        staging.write(buffer[self._num_bytes :], offer.proof)  # behind all that a frame can fill
        self._buffers.put(slot, buffer)
        self._offers[slot] = offer
        return offer
