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


class _Link(asyncio.Transport):
    """A client that reads at once."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self._protocol = protocol
        self.data = bytearray()
        self.closed = asyncio.Event()
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.data += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def post(door: Door, route: str, body: Any) -> tuple[int, Any]:
    """Ask for a whole answer; returns status and body."""
    data = json.dumps(body).encode()
    link = _Link(protocol := door())
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}"
    protocol.data_received(f"{head}\r\n\r\n".encode() + data)
    await link.closed.wait()
    head, _, data = bytes(link.data).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(data)
