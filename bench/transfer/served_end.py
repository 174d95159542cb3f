"""Frames as the mesh moves them between two processes: gathered out of a pool, with a digest, into
one of the windows that the receiver has room for, or into staging and sent as a message; verified
and copied out into a pool there, and only then is the receiver's room free again.

The ends' work is in line, where a worker has a thread for it; what they do is the same.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from bench.transfer.end import say
from bench.transfer.pairs import WINDOW
from shared.engine.memory.staging import digest
from shared.transfer.frames import HEADER_BYTES
from shared.transport.base import Outcome
from shared.transport.ucxx import UcxEndpoint, UcxTransport

STAGING_BYTES = 128 << 20
"""Of a decode worker, by default."""

POOL_BYTES = 256 << 20
"""Where frames come from, and go: more than caches hold."""


async def done(operation: Any) -> None:
    """Wait for an operation; anything but success ends the measurement."""
    if await operation.settled() is not Outcome.DONE:
        raise SystemExit(f"{operation}")


def new_pool(num_bytes: int) -> np.ndarray:
    """Frames of a pool, one a row, written."""
    return np.ones((max(1, POOL_BYTES // num_bytes), num_bytes), np.uint8)


def num_slots(num_bytes: int) -> int:
    """Frames that staging has room for, and two at least."""
    return max(2, min(WINDOW, STAGING_BYTES // num_bytes))


class Sink:
    """The room and the pool of one size. keys: of windows, where it is the sender that writes."""

    def __init__(self, slots: list[np.ndarray], keys: str, num_bytes: int) -> None:
        self._slots = slots
        self._keys = keys
        self._headers = np.zeros((len(slots), HEADER_BYTES), np.uint8)
        self._pool = new_pool(num_bytes)

    @classmethod
    async def open(cls, transport: UcxTransport, num_bytes: int, *, has_windows: bool) -> Sink:
        """Have as many slots as staging holds."""
        if not has_windows:
            return cls(list(np.ones((num_slots(num_bytes), num_bytes), np.uint8)), "", num_bytes)
        windows = [await transport.new_window(num_bytes) for _ in range(num_slots(num_bytes))]
        found = [window for window in windows if window is not None]
        if len(found) < len(windows):
            raise SystemExit("no window")
        slots = [np.frombuffer(window.memory, np.uint8) for window in found]
        return cls(slots, ",".join(window.key.hex() for window in found), num_bytes)

    async def receive(
        self, transport: UcxTransport, endpoint: UcxEndpoint, job: dict[str, Any]
    ) -> None:
        """Verify and place a batch, frame by frame, and give each frame's room back."""
        count, tag, num_slots = job["count"], job["tag"], len(self._slots)
        self._pool[:count] = 0

        def post(idx: int) -> list[Any]:
            slot = idx % num_slots
            header, payload = self._headers[slot], self._slots[slot]
            posted = [transport.receive(endpoint, header, HEADER_BYTES, tag + idx)]
            if not self._keys:
                room = transport.receive(endpoint, payload, len(payload), tag + 2 * count + idx)
                posted.append(room)
            return posted

        posted = deque(post(idx) for idx in range(min(num_slots, count)))
        credit, credits_ = np.zeros(1, np.uint8), deque[Any]()
        say(self._keys)
        for idx in range(count):
            for operation in posted.popleft():
                await done(operation)
            slot = idx % num_slots
            payload = self._slots[slot]
            if digest(payload) != int.from_bytes(self._headers[slot, :8].tobytes(), "little"):
                raise SystemExit("a frame arrived damaged")
            np.copyto(self._pool[idx % len(self._pool)], payload)
            if idx + num_slots < count:
                posted.append(post(idx + num_slots))
            credits_.append(endpoint.send(credit, 1, tag + count + idx))
        while credits_:
            await done(credits_.popleft())
        if not self._pool[:count].all():
            raise SystemExit("the bytes did not arrive")


class Source:
    """The receiver's windows of one size, mapped, or staging of its own; and the pool."""

    def __init__(self, slots: list[np.ndarray], num_bytes: int, *, has_windows: bool) -> None:
        self._slots = slots
        self._has_windows = has_windows
        self._headers = np.zeros((len(slots), HEADER_BYTES), np.uint8)
        self._pool = new_pool(num_bytes)
        self._credit = np.zeros(1, np.uint8)

    @classmethod
    async def open(cls, endpoint: UcxEndpoint, keys: str, num_bytes: int) -> Source:
        """Map the other end's windows, if it has any."""
        if not keys:
            slots = list(np.ones((num_slots(num_bytes), num_bytes), np.uint8))
            return cls(slots, num_bytes, has_windows=False)
        windows = [await endpoint.map_window(bytes.fromhex(key)) for key in keys.split(",")]
        if None in windows:
            raise SystemExit("no window")
        slots = [np.frombuffer(memory, np.uint8) for memory in windows if memory]
        return cls(slots, num_bytes, has_windows=True)

    async def send(
        self,
        transport: UcxTransport,
        endpoint: UcxEndpoint,
        job: dict[str, Any],
        first: int,
        stop: int,
    ) -> None:
        """Send some frames of a batch, no more than there is room for beyond what was placed."""
        count, tag = job["count"], job["tag"]
        given, sent = deque[Any](), deque[Any]()
        for idx in range(first, stop):
            if len(given) == len(self._slots):
                await done(given.popleft())
                for operation in sent.popleft():
                    await done(operation)
            slot = idx % len(self._slots)
            payload, header = self._slots[slot], self._headers[slot]
            np.copyto(payload, self._pool[idx % len(self._pool)])
            header[:8] = np.frombuffer(digest(payload).to_bytes(8, "little"), np.uint8)
            given.append(transport.receive(endpoint, self._credit, 1, tag + count + idx))
            sent.append([endpoint.send(header, HEADER_BYTES, tag + idx)])
            if not self._has_windows:
                sent[-1].append(endpoint.send(payload, len(payload), tag + 2 * count + idx))
        for operation in (*(one for each in sent for one in each), *given):
            await done(operation)
