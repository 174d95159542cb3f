"""HTTP through memory, for meshes under virtual time: what a gateway listens with, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.http import connection

Door = Callable[[], Any]
"""Makes the gateway's end of a connection."""


@contextlib.contextmanager
def memory_doors() -> Iterator[list[Door]]:
    """Have gateways listen in memory for the length of the block; gives their doors, in order."""
    doors: list[Door] = []

    async def listen_at(door: Door, *_: Any, **__: Any) -> Any:
        doors.append(door)
        here = SimpleNamespace(getsockname=lambda: ("127.0.0.1", len(doors)))
        return SimpleNamespace(sockets=[here], close=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "listen_at", listen_at)
        yield doors


class MemoryLink(asyncio.Transport):
    """A connection to a door, as the gateway has it, and its client, who reads at once:
    ``reader``, ``say``."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.door = door
        self._protocol = door()
        self.reader = asyncio.StreamReader()
        self.closed = asyncio.Event()
        self._protocol.connection_made(self)

    def say(self, data: bytes) -> None:
        """Send to the gateway, if it still listens."""
        if not self.closed.is_set():
            self._protocol.data_received(data)

    def write(self, data: Any) -> None:
        self.reader.feed_data(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.reader.feed_eof()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def post(door: Door, route: str, body: Any) -> tuple[int, Any]:
    """Ask for a whole answer; returns status and body."""
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}"
    link = MemoryLink(door)
    link.say(f"{head}\r\n\r\n".encode() + data)
    head, _, data = (await link.reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(data)
