"""Calls of our own RPCs as a test's client makes them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from shared.errors import RemoteProtocolError
from shared.rpc import methods
from shared.rpc.methods import Method, Reply, Request
from shared.rpc.stream import ClientStream, open_stream

ALL_METHODS: list[Method[Any, Any]] = [
    it for it in vars(methods).values() if isinstance(it, Method)
]
"""Every RPC that there is."""


async def call_unary(
    channel: Any,
    method: Method[Request, Reply],
    request: Request,
    *,
    timeout_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Reply:
    """One request, one reply. Raises MeshError."""
    async with open_stream(channel, method, timeout_s=timeout_s, metadata=metadata) as stream:
        await stream.send(request, end=True)
        reply = await stream.receive()
        if reply is None:
            raise RemoteProtocolError("the server ended the call without a reply")
        await stream.receive()
        return reply


@contextlib.asynccontextmanager
async def call_server_stream(
    channel: Any,
    method: Method[Request, Reply],
    request: Request,
    *,
    timeout_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> AsyncGenerator[ClientStream[Request, Reply]]:
    """One request, a stream of replies; the request is sent on entering."""
    async with open_stream(channel, method, timeout_s=timeout_s, metadata=metadata) as stream:
        await stream.send(request, end=True)
        yield stream
