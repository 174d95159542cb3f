"""A raw HTTP client of the gateway, for tests that look at statuses, headers and bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from services.gateway.front.auth import KeyRing
from tests.support.memory_http import MemoryLink, memory_doors
from tests.support.scripted_mesh import ScriptedMesh, http_gateway

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


class Client:
    """A raw HTTP client of one gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any, Any]:
        """Send a request; returns status, headers, and the parsed body."""
        async with self.session.request(method, self.url + path, **options) as response:
            return response.status, response.headers, json.loads(await response.read() or b"null")

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        """POST JSON and expect success."""
        status, _, answer = await self.ask("POST", path, json=body, **options)
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: Any) -> list[Any]:
        """POST JSON and return the stream's events, parsed; ``[DONE]`` stays text."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.read()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())


def parse_events(data: bytes) -> list[Any]:
    """Parse a whole event stream."""
    assert data.endswith(b"\n\n")
    events: list[Any] = []
    for event in data[:-2].split(b"\n\n"):
        assert event.startswith(b"data: ")
        text = event[6:]
        events.append("[DONE]" if text == b"[DONE]" else json.loads(text))
    return events


def parse_named_events(data: bytes) -> list[Any]:
    """Parse a whole stream of events that are named as their data says."""
    events: list[Any] = []
    for event in data.removesuffix(b"\n\n").decode().split("\n\n"):
        name, text = event.split("\n")
        events.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@asynccontextmanager
async def gateway(mesh: ScriptedMesh, keys: KeyRing | None = None) -> AsyncGenerator[Client]:
    """Serve a scripted mesh and connect to it."""
    async with http_gateway(mesh, keys) as url, aiohttp.ClientSession() as session:
        yield Client(url, session)


@asynccontextmanager
async def memory_link(mesh: ScriptedMesh) -> AsyncGenerator[MemoryLink]:
    """Serve a scripted mesh in memory, under virtual time, and connect to it."""
    with memory_doors() as doors:
        async with http_gateway(mesh):
            yield MemoryLink(doors[0])


@asynccontextmanager
async def raw_connection(
    url: str,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a plain socket to the gateway, with a small receive buffer."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=8192)
    try:
        yield reader, writer
    finally:
        writer.close()


def post_bytes(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data
