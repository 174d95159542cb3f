"""The sink's staging slots as the source sees them: memory of another process, mapped for writing.

All of a pair's windows are mapped when it is made, or none; a slot that gets new memory later is
mapped while its first frame waits. Each is believed only when the proof that the sink put at its
end can be read there. This module knows no frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog

from shared.engine.base import Buffer
from shared.errors import TransferFailed
from shared.transfer.messages import WindowOffer
from shared.transport.base import Endpoint

_log = structlog.get_logger(__name__)


class PeerWindows:
    """Windows of one pair, by the sink's slot number; falsy if frames must go as messages.

    A mapping lives until nothing refers to it: a gather under way keeps its own.
    """

    def __init__(self, endpoint: Endpoint, least_bytes: int) -> None:
        """least_bytes: of a frame with its header; a smaller window is none."""
        self._endpoint = endpoint
        self._least_bytes = least_bytes
        self._windows: dict[int, Buffer] = {}
        self._offers: dict[int, WindowOffer] = {}  # newer than what is mapped

    def __bool__(self) -> bool:
        return bool(self._windows)

    async def map_all(self, offers: Sequence[WindowOffer]) -> bool:
        """Map all; False: at least one cannot be, or there are none, and none is kept.

        Raises TransferFailed: a key is malformed.
        """
        for offer in offers:
            window = await self._map(offer)
            if window is None:
                self._windows.clear()
                return False
            self._windows[offer.slot] = window
        return bool(self._windows)

    def drop(self) -> None:
        """Nothing is written there any more: the pair is lost."""
        self._windows.clear()

    def replace(self, offers: Sequence[WindowOffer]) -> None:
        """These slots have new memory: write the old no more."""
        self._offers.update((offer.slot, offer) for offer in offers)

    async def at(self, slot: int) -> Buffer:
        """Return the memory of the sink's slot.

        Raises TransferFailed: the sink has no such slot, or its new memory cannot be mapped.
        """
        if (offer := self._offers.get(slot)) is not None:
            window = await self._map(offer)
            if window is None:
                raise TransferFailed("decode's new staging cannot be mapped", code="window")
            self._windows[slot] = window
            # Another may have come while this one was mapped.
            if self._offers.get(slot) is offer:
                del self._offers[slot]
        if slot not in self._windows:
            raise TransferFailed("decode named a staging slot that it never offered", code="window")
        return self._windows[slot]

    async def _map(self, offer: WindowOffer) -> Buffer | None:
        memory = await self._endpoint.map_window(offer.key)
        if memory is None:
            return None
        window = np.frombuffer(memory, np.uint8)
        is_large = len(window) >= self._least_bytes + len(offer.proof)
        if not is_large or window[-len(offer.proof) :].tobytes() != offer.proof:
            _log.warning("what a window's key leads to is not decode's staging", slot=offer.slot)
            return None
        return window
