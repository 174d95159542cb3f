"""docs/protocol.md's table of errors, row by row, through the doors themselves: HTTP, SSE, gRPC."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grpclib.client import Channel
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError

from services.gateway.grpc.door import Inference
from shared import wire
from shared.address import Address
from shared.errors import ERROR_TYPES, MeshError
from shared.messages.columns import pack_u32
from shared.rpc.status import ERROR_TRAILER
from shared.rpc.tcp import TcpNetwork
from tests.support.house import ROOT
from tests.support.http_client import gateway
from tests.support.scripted_mesh import ScriptedMesh, failing_after, front_door

PAGE = ROOT / "docs" / "protocol.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (\d+) \| `(\w+)` \| (\w+) \|", re.MULTILINE)


def rows() -> Iterator[Any]:
    """Every row whose error can be raised, plainly and with one of its finer codes, which are words
    to the doors."""
    for kind, codes, status, openai_type, grpc in ROW.findall(PAGE.read_text()):
        if kind in ERROR_TYPES:
            for code in ["", *re.findall(r"`(\w+)`", codes)[:1]]:
                name = f"{kind} {code}".strip()
                yield pytest.param(kind, code, int(status), openai_type, grpc, id=name)


@pytest.mark.parametrize(("kind", "code", "status", "openai_type", "grpc"), [*rows()])
async def test_an_error_looks_at_every_door_as_the_table_says(
    kind: str, code: str, status: int, openai_type: str, grpc: str
) -> None:
    """Before the first token as a status, after it as the last event; over gRPC as a status and a
    trailer."""
    error: MeshError = ERROR_TYPES[kind]("it went wrong", code=code)
    refusing = ScriptedMesh()
    refusing.refusal = error
    async with gateway(refusing) as client:
        found, _, body = await client.ask("POST", "/v1/completions", json={"prompt": "a"})
    assert found == status
    assert (body["error"]["type"], body["error"]["code"]) == (openai_type, code or kind)

    breaking = ScriptedMesh(failing_after("the", error))
    async with gateway(breaking) as client:
        *_, last = await client.events("/v1/completions", {"prompt": "a"})
    assert (last["error"]["type"], last["error"]["code"]) == (openai_type, code or kind)

    raised, trailer = await over_grpc(ScriptedMesh(failing_after("the", error)))
    assert raised.status.name == grpc
    assert (trailer["type"], trailer["code"]) == (kind, code)


async def over_grpc(mesh: ScriptedMesh) -> tuple[GRPCError, dict[str, Any]]:
    """Ask with grpclib's own client; the error and what the trailer says."""
    front = front_door(mesh)
    request = wire.GenerateRequest(
        token_ids=pack_u32([7, 8]), params=wire.GenerateParams(max_tokens=4)
    )
    try:
        servicers = [Inference(front).servicer()]
        async with TcpNetwork().serve(Address("127.0.0.1", 0), servicers) as server:
            channel = Channel("127.0.0.1", server.address.port)
            call = channel.request(
                "/pdmesh.v1.Inference/Generate",
                Cardinality.UNARY_STREAM,
                wire.GenerateRequest,
                wire.GenerateResponse,
            )

            async def read() -> None:
                async with call as stream:
                    await stream.send_message(request, end=True)
                    async for _ in stream:
                        pass

            try:
                with pytest.raises(GRPCError) as raised:
                    await read()
            finally:
                channel.close()
            assert call.trailing_metadata is not None
            return raised.value, json.loads(str(call.trailing_metadata[ERROR_TRAILER]))
    finally:
        front.text.close()
