"""Frames as the mesh moves them between two processes of one host: gathered out of a pool into one
of the windows that the receiver has room for, with a digest; verified and copied out into a pool
there, and only then is the window free again.

The ends' work is in line, where a worker has a thread for it; what they do is the same.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from bench.transfer.end import done, say
from shared.engine.memory.staging import digest
from shared.transfer.frames import HEADER_BYTES
from shared.transport.ucxx import UcxEndpoint, UcxTransport

STAGING_BYTES = 128 << 20
"""Of a decode worker, by default."""

POOL_BYTES = 256 << 20
"""Where frames come from, and go: more than caches hold."""


def new_pool(num_bytes: int) -> np.ndarray:
    """Frames of a pool, one a row, written."""
    return np.ones((max(1, POOL_BYTES // num_bytes), num_bytes), np.uint8)


class Sink:
    """The windows and the pool of one size."""

    def __init__(self, windows: list[Any], num_bytes: int) -> None:
        self._windows = [np.frombuffer(window.memory, np.uint8) for window in windows]
        self.keys = ",".join(window.key.hex() for window in windows)
        self._headers = np.zeros((len(windows), HEADER_BYTES), np.uint8)
        self._pool = new_pool(num_bytes)

    @classmethod
    async def open(cls, transport: UcxTransport, num_bytes: int, most: int) -> Sink:
        """Have as many windows as staging holds, and two at least."""
        count = max(2, min(most, STAGING_BYTES // num_bytes))
        windows = [await transport.new_window(num_bytes) for _ in range(count)]
        if None in windows:
            raise SystemExit("no window")
        return cls(windows, num_bytes)

    async def receive(
        self, transport: UcxTransport, endpoint: UcxEndpoint, job: dict[str, Any]
    ) -> None:
        """Verify and place a batch, frame by frame, and give each frame's window back."""
        count, tag, num_slots = job["count"], job["tag"], len(self._windows)
        self._pool[:count] = 0

        def post(idx: int) -> Any:
            return transport.receive(
                endpoint, self._headers[idx % num_slots], HEADER_BYTES, tag + idx
            )

        posted = deque(post(idx) for idx in range(min(num_slots, count)))
        credit, credits_ = np.zeros(1, np.uint8), deque[Any]()
        say(self.keys)
        for idx in range(count):
            await done(posted.popleft())
            slot = idx % num_slots
            payload = self._windows[slot]
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
    """The mapped windows of one size, and the pool."""

    def __init__(self, windows: list[np.ndarray], num_bytes: int) -> None:
        self._windows = windows
        self._headers = np.zeros((len(windows), HEADER_BYTES), np.uint8)
        self._pool = new_pool(num_bytes)
        self._credit = np.zeros(1, np.uint8)

    @classmethod
    async def open(cls, endpoint: UcxEndpoint, keys: str, num_bytes: int) -> Source:
        """Map the other end's windows."""
        windows = [await endpoint.map_window(bytes.fromhex(key)) for key in keys.split(",")]
        if None in windows:
            raise SystemExit("no window")
        return cls([np.frombuffer(memory, np.uint8) for memory in windows if memory], num_bytes)

    async def send(
        self,
        transport: UcxTransport,
        endpoint: UcxEndpoint,
        job: dict[str, Any],
        first: int,
        stop: int,
    ) -> None:
        """Send some frames of a batch, no more than there are windows beyond what was placed."""
        count, tag = job["count"], job["tag"]
        given, sent = deque[Any](), deque[Any]()
        for idx in range(first, stop):
            if len(given) == len(self._windows):
                await done(given.popleft())
                await done(sent.popleft())
            slot = idx % len(self._windows)
            payload, header = self._windows[slot], self._headers[slot]
            np.copyto(payload, self._pool[idx % len(self._pool)])
            header[:8] = np.frombuffer(digest(payload).to_bytes(8, "little"), np.uint8)
            given.append(transport.receive(endpoint, self._credit, 1, tag + count + idx))
            sent.append(endpoint.send(header, HEADER_BYTES, tag + idx))
        for operation in (*sent, *given):
            await done(operation)
