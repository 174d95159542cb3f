"""A pdmesh gateway under load by its gRPC API: packed token ids both ways, no text.

A Python gRPC client costs about twice what HTTP costs per message; its lag is reported like any
other, and voids a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from services.cli.bench.endpoints import Description
from services.cli.bench.prompts import Prompts
from services.cli.bench.records import Ending, Record
from services.cli.client import NO_ACCESS, Access, CannotRun, GatewayRefused
from shared import wire
from shared.address import Address, parse_address
from shared.errors import MeshError, Overloaded, QuotaExceeded, ShuttingDown, WorkerLost
from shared.messages.columns import pack_u32
from shared.rpc.methods import GENERATE, LIST_MODELS
from shared.rpc.stream import call_unary, open_stream
from shared.rpc.tcp import TcpNetwork
from shared.rpc.tls import GRPC

DEFAULT_PORT: Final = 8001
STREAMS_PER_CONNECTION: Final = 500
"""Beyond it another connection is opened, so that no server's limit of streams holds us back."""

PROBE_WITHIN_S: Final = 60.0


class MeshEndpoint:
    """See ServerEndpoint."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        network: TcpNetwork,
        address: Address,
        metadata: dict[str, str],
        description: Description,
    ) -> None:
        self._stack = stack
        self._network = network
        self._address = address
        self._metadata = metadata
        self._channels: list[tuple[Any, list[int]]] = []
        self.description = description

    def prepare(self, prompts: Prompts, index: int) -> bytes:
        """See ServerEndpoint."""
        num_output = prompts.workload.asks[index].num_output
        params = wire.GenerateParams(max_tokens=num_output, temperature=0.0)
        if self.description.is_length_fixed:
            params.min_tokens, params.ignore_eos = num_output, True
        request = wire.GenerateRequest(
            model=self.description.model, token_ids=pack_u32(prompts.ids(index)), params=params
        )
        return bytes(request)

    async def answer(self, request: bytes, record: Record) -> None:
        """See ServerEndpoint."""
        channel, num_open = await self._channel()
        num_open[0] += 1
        record.is_counted = True
        try:
            async with open_stream(channel, GENERATE, metadata=self._metadata) as stream:
                await stream.send(wire.GenerateRequest.parse(request), end=True)
                async for reply in stream:
                    if reply.token_ids:
                        record.add(time.perf_counter(), len(reply.token_ids) // 4)
                    if reply.usage is not None:
                        record.num_prompt = reply.usage.prompt_tokens
                        record.num_cached = reply.usage.cached_tokens
            if record.times:
                record.end = Ending.COMPLETE
            else:
                record.fail(Ending.FAILED, "an answer without a token")
        except MeshError as error:
            record.fail(_end_of(error, record), error.message)
        finally:
            num_open[0] -= 1

    async def models(self) -> list[Any]:
        """Return what is served."""
        channel, _ = await self._channel()
        reply = await call_unary(
            channel,
            LIST_MODELS,
            wire.ListModelsRequest(),
            timeout_s=PROBE_WITHIN_S,
            metadata=self._metadata,
        )
        return list(reply.models)

    async def _channel(self) -> tuple[Any, list[int]]:
        for opened in self._channels:
            if opened[1][0] < STREAMS_PER_CONNECTION:
                return opened
        channel = await self._stack.enter_async_context(self._network.channel(self._address))
        self._channels.append((channel, [0]))
        return self._channels[-1]


@contextlib.asynccontextmanager
async def open_mesh_endpoint(
    url: str, *, model: str = "", access: Access = NO_ACCESS, ignore_eos: bool = True
) -> AsyncGenerator[MeshEndpoint]:
    """Open a gateway. Raises CannotRun: nothing answers. GatewayRefused: its own words."""
    scheme, _, name = url.rstrip("/").partition("://")
    network = TcpNetwork(client_tls=access.tls(alpn=GRPC) if scheme == "grpcs" else None)
    address = parse_address(name, param="url", default_port=DEFAULT_PORT)
    metadata = {"authorization": f"Bearer {access.api_key}"} if access.api_key else {}
    found = Description(url=url, api="pdmesh gRPC", model=model)
    async with contextlib.AsyncExitStack() as stack:
        endpoint = MeshEndpoint(stack, network, address, metadata, found)
        try:
            served = await endpoint.models()
        except WorkerLost as error:
            raise CannotRun(f"nothing answers at {url} ({error.message})") from None
        except MeshError as error:
            raise GatewayRefused(f"{url}: {error.message}") from None
        for entry in served:
            if not model or entry.name == model:
                endpoint.description = Description(
                    url=url,
                    api=found.api,
                    model=entry.name,
                    max_model_len=entry.max_model_len,
                    is_length_fixed=ignore_eos,
                )
                break
        else:
            raise CannotRun(f"{url} does not serve {model or 'a model yet'}")
        yield endpoint


def _end_of(error: MeshError, record: Record) -> Ending:
    if record.times:
        return Ending.CUT
    is_refused = isinstance(error, (Overloaded, QuotaExceeded, ShuttingDown))
    if is_refused or error.code == "resource_exhausted":
        return Ending.REFUSED
    return Ending.UNREACHABLE if isinstance(error, WorkerLost) else Ending.FAILED
