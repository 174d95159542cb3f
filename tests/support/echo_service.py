"""A gRPC service whose every call does what its request says; with the server it records what
happened to its calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from shared import wire
from shared.address import Address
from shared.errors import NoBlocks, Overloaded
from shared.rpc.methods import GENERATE, TOKENIZE, WORKER_SESSION
from shared.rpc.network import Network
from shared.rpc.service import ServerStream, Servicer, bind, bind_unary

ANY_PORT = Address("127.0.0.1", 0)


@dataclass
class EchoService:
    """``text`` of a GenerateRequest: ``count:N``, ``flood:N``, ``wait``, ``linger``, ``refuse``,
    ``late``, ``bug``."""

    started: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_started: int = 0
    num_cancelled: int = 0
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    peer: Address | None = None
    remaining_s: float | None = None

    @property
    def servicers(self) -> list[Servicer]:
        return [
            Servicer(bind(GENERATE, self.generate), bind_unary(TOKENIZE, self.tokenize)),
            Servicer(bind(WORKER_SESSION, self.session)),
        ]

    async def generate(
        self, call: ServerStream[wire.GenerateRequest, wire.GenerateResponse]
    ) -> None:
        request = await call.receive()
        assert request is not None
        self.metadata, self.peer = dict(call.metadata), call.peer
        if call.deadline_at is not None:
            self.remaining_s = call.deadline_at - asyncio.get_running_loop().time()
        self.num_started += 1
        self.started.set()
        verb, _, argument = request.text.partition(":")
        try:
            match verb:
                case "count" | "late":
                    for index in range(int(argument or 1)):
                        await call.send(wire.GenerateResponse(first_index=index, text="x"))
                    if verb == "late":
                        raise NoBlocks("no room left", param="text", code="full")
                case "flood":
                    for _ in range(int(argument)):
                        await call.send(wire.GenerateResponse(text="x" * 60_000))
                case "wait":
                    await asyncio.Event().wait()
                case "linger":
                    await self.released.wait()
                    await call.send(wire.GenerateResponse(text="released"))
                case "refuse":
                    raise Overloaded("too much at once, wörld\n", retry_after_s=2.5)
                case "bug":
                    raise KeyError("a secret of ours")
                case _:
                    await call.send(wire.GenerateResponse(text=request.text))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.ended.set()
        call.set_trailer("pdmesh-receipt", '{"ttft_s":1}')

    async def tokenize(
        self, request: wire.TokenizeRequest, call: ServerStream[Any, Any]
    ) -> wire.TokenizeResponse:
        del call
        return wire.TokenizeResponse(token_ids=request.text.encode(), max_model_len=7)

    async def session(self, call: ServerStream[wire.WorkerCommand, wire.WorkerEvent]) -> None:
        self.started.set()
        while (command := await call.receive()) is not None:
            if command.cancel is not None:
                raise NoBlocks("no room", retry_after_s=1.5)
            if command.order is not None:
                await call.send(granted(command.order.stream_id))


@contextlib.asynccontextmanager
async def echo_server(network: Network) -> AsyncIterator[tuple[EchoService, Any]]:
    """Serve an EchoService on a free port."""
    service = EchoService()
    async with network.serve(ANY_PORT, service.servicers) as server:
        yield service, server


def reserve(stream_id: int) -> wire.WorkerCommand:
    """Return a command that the session answers."""
    return wire.WorkerCommand(order=wire.WorkOrder(stream_id=stream_id))


def granted(stream_id: int) -> wire.WorkerEvent:
    """Return the session's answer."""
    return wire.WorkerEvent(granted=wire.Granted(stream_id=stream_id))


def ask(text: str) -> wire.GenerateRequest:
    """Return a request that says what to do."""
    return wire.GenerateRequest(text=text)
