"""Calls of our own RPCs as a test's client makes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from grpclib.metadata import Deadline

from shared.errors import DeadlinePassed, RemoteProtocolError
from shared.rpc import methods
from shared.rpc.methods import Method, Reply, Request
from shared.rpc.stream import ClientStream, open_stream

ALL_METHODS: list[Method[Any, Any]] = [
    it for it in vars(methods).values() if isinstance(it, Method)
]
"""Every RPC that there is."""


class _LoopDeadline(Deadline):
    """grpclib's deadline on the loop's clock instead of ``time.monotonic``."""

    def __init__(self, at: float) -> None:
        super().__init__(_timestamp=at)

    def time_remaining(self) -> float:
        return max(0.0, self._timestamp - asyncio.get_running_loop().time())


class _Telling:
    """A channel whose calls tell the server more than services tell each other."""

    def __init__(self, channel: Any, **more: Any) -> None:
        self._channel = channel
        self._more = more

    def request(self, *shape: Any) -> Any:
        return self._channel.request(*shape, **self._more)


@contextlib.asynccontextmanager
async def open_call(
    channel: Any,
    method: Method[Request, Reply],
    *,
    timeout_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> AsyncGenerator[ClientStream[Request, Reply]]:
    """As ``open_stream``. timeout_s: a deadline for the whole call, told to the server too: then
    DeadlinePassed is raised. metadata: likewise told."""
    more: dict[str, Any] = {"metadata": dict(metadata or {})}
    at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    if at is not None:
        more["deadline"] = _LoopDeadline(at)
    async with open_stream(_Telling(channel, **more), method) as stream:
        if at is None:
            yield stream
            return
        passed = DeadlinePassed("the call's deadline passed")
        timer = asyncio.get_running_loop().call_at(at, stream._raw._wrapper.cancel, passed)
        try:
            yield stream
        finally:
            timer.cancel()


async def call_unary(
    channel: Any,
    method: Method[Request, Reply],
    request: Request,
    *,
    timeout_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Reply:
    """One request, one reply. Raises MeshError."""
    async with open_call(channel, method, timeout_s=timeout_s, metadata=metadata) as stream:
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
    async with open_call(channel, method, timeout_s=timeout_s, metadata=metadata) as stream:
        await stream.send(request, end=True)
        yield stream
