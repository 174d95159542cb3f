"""Google's own gRPC client, with stubs generated from proto/, against the gateway's Inference
service."""

from __future__ import annotations

import asyncio
import importlib
import json
import struct
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_tools import protoc

from services.gateway.front.auth import KeyRing, hash_key
from shared.errors import WorkerLost
from tests.interop.conftest import GrpcTarget, grpc_gateway
from tests.support.client_environments import PINS
from tests.support.demo_truth import client_task, recall_prompts
from tests.support.foreign_client import run_client_well
from tests.support.house import ROOT
from tests.support.scripted_mesh import ScriptedMesh, failing_after, saying

PROTO = ROOT / "proto"


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Message classes and stubs, generated as a client in any language would."""
    out = tmp_path_factory.mktemp("stubs")
    files = [str(PROTO / "pdmesh" / "v1" / name) for name in ("common.proto", "inference.proto")]
    options = [f"-I{PROTO}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(["protoc", *options, *files]) == 0
    sys.path.insert(0, str(out))
    try:
        common = importlib.import_module("pdmesh.v1.common_pb2")
        messages = importlib.import_module("pdmesh.v1.inference_pb2")
        service = importlib.import_module("pdmesh.v1.inference_pb2_grpc")

        yield SimpleNamespace(common=common, messages=messages, service=service.InferenceStub)
    finally:
        sys.path.remove(str(out))


class Client:
    """One channel."""

    def __init__(self, channel: Any, stubs: Any, api_key: str) -> None:
        self.stubs = stubs
        self.stub = stubs.service(channel)
        self.metadata = (("authorization", f"Bearer {api_key}"),)

    def start(self, *, timeout: float | None = None, **fields: Any) -> Any:
        """Start Generate; returns the call."""
        if "params" in fields:
            fields["params"] = self.stubs.messages.GenerateParams(**fields["params"])
        request = self.stubs.messages.GenerateRequest(**fields)
        return self.stub.Generate(request, timeout=timeout, metadata=self.metadata)


async def read(call: Any) -> list[Any]:
    """Read a call's messages to its end."""
    return [message async for message in call]


def trailer(metadata: Any, name: str) -> Any:
    """Return a JSON trailer."""
    return json.loads(dict(metadata)[name])


def u32(data: bytes) -> Sequence[int]:
    """Unpack a u32 column as a client would."""
    return struct.unpack(f"<{len(data) // 4}I", data)


@pytest.fixture
async def client(grpc_target: GrpcTarget, stubs: Any) -> AsyncIterator[Client]:
    """A connected client."""
    async with grpc.aio.insecure_channel(grpc_target.address) as channel:
        yield Client(channel, stubs, grpc_target.api_key)


async def test_generate_from_text_ids_and_messages(client: Client) -> None:
    """Every kind of prompt gives text whose ids have no gap, one finish reason, usage and a
    receipt."""
    messages = [client.stubs.messages.ChatMessage(role="user", content="Tell a story.")]
    ids = await client.stub.Tokenize(
        client.stubs.messages.TokenizeRequest(text="Once upon"), metadata=client.metadata
    )
    answers: list[str] = []
    prompts: tuple[dict[str, Any], ...] = (
        {"text": "Once upon"},
        {"token_ids": ids.token_ids},
        {"messages": messages},
    )
    for prompt in prompts:
        call = client.start(params={"temperature": 0, "max_tokens": 12}, **prompt)
        received = await read(call)
        num_tokens = 0
        for message in received:
            assert message.first_index == num_tokens
            num_tokens += len(u32(message.token_ids))
        last = received[-1]
        common = client.stubs.common
        assert last.finish_reason in (common.FINISH_REASON_STOP, common.FINISH_REASON_LENGTH)
        assert last.usage.completion_tokens == num_tokens
        assert all(message.finish_reason == 0 for message in received[:-1])
        assert trailer(await call.trailing_metadata(), "pdmesh-receipt")
        answers.append("".join(message.text for message in received))
    assert answers[0] == answers[1]


async def test_logprobs(client: Client) -> None:
    """One value a token, with alternatives when asked for."""
    params = {"temperature": 0, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    received = await read(client.start(text="Once upon", params=params))
    num_tokens = sum(len(u32(message.token_ids)) for message in received)
    assert sum(len(message.logprobs) // 4 for message in received) == num_tokens
    tops = [top for message in received for top in message.top_logprobs]
    assert [len(u32(top.token_ids)) for top in tops] == [2] * num_tokens
    assert len(received[0].prompt_logprobs) == received[-1].usage.prompt_tokens


async def test_models(client: Client) -> None:
    """The served model and its limits."""
    reply = await client.stub.ListModels(
        client.stubs.messages.ListModelsRequest(), metadata=client.metadata
    )
    (model,) = reply.models
    assert model.max_model_len > 0


async def test_errors_have_a_status_and_a_typed_trailer(client: Client) -> None:
    """Any client sees the code; ours reads the rest."""
    codes = grpc.StatusCode
    cases: tuple[tuple[dict[str, Any], grpc.StatusCode, str], ...] = (
        ({"text": "a", "model": "no-such"}, codes.NOT_FOUND, "not_found"),
        ({}, codes.INVALID_ARGUMENT, "invalid_request"),
        ({"text": "a", "params": {"top_p": 2}}, codes.INVALID_ARGUMENT, "invalid_request"),
    )
    for fields, code, kind in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client.start(**fields))
        assert caught.value.code() is code
        assert trailer(caught.value.trailing_metadata(), "pdmesh-error")["type"] == kind


async def test_an_error_after_the_first_token(grpc_target: GrpcTarget, client: Client) -> None:
    """What arrived stays; the status says that it is not whole."""
    grpc_target.scripted().script = failing_after("the", WorkerLost("gone"))
    call = client.start(text="a")
    first = await call.read()
    assert first.text == "the"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert trailer(caught.value.trailing_metadata(), "pdmesh-error")["type"] == "worker_lost"


async def test_cancelling_a_call_cancels_the_generation(
    grpc_target: GrpcTarget, client: Client
) -> None:
    """A client's cancel reaches the mesh."""
    mesh = grpc_target.scripted()
    mesh.script = saying("the and", per_batch=1, gate=asyncio.Semaphore(1))
    call = client.start(text="a")
    assert (await call.read()).text == "the"
    call.cancel()
    await mesh.wait_running(0)


async def test_the_clients_deadline_ends_the_generation(
    grpc_target: GrpcTarget, client: Client
) -> None:
    """grpc-timeout arrives as a deadline, and both sides end."""
    mesh = grpc_target.scripted()
    mesh.script = saying("the and", per_batch=1, gate=asyncio.Semaphore(1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(client.start(text="a", timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await mesh.wait_running(0)
    assert mesh.requests[0].deadline_at is not None


@pytest.mark.process
async def test_health_and_reflection(running_mesh: tuple[str, str], tmp_path: Path) -> None:
    """A client without generated code learns the API from reflection and gets the right answer;
    health tells of the process and of the service."""
    prompts = recall_prompts(1)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(client_task(running_mesh[0], prompts)))
    # In a process of its own: its generated code cannot be imported beside grpclib's.
    words = await run_client_well(
        *(sys.executable, PINS / "grpc_reflection_client.py", running_mesh[1], task),
        cwd=tmp_path,
        within_s=120,
    )
    got = json.loads(words.splitlines()[-1])
    assert "grpc.health.v1.Health" in got["services"]
    ours = [name for name in got["services"] if name.startswith("pdmesh.")]
    assert ours == ["pdmesh.v1.Inference"]  # what only workers need has a door of its own
    assert got["health"] == {
        "": "SERVING",
        "pdmesh.v1.Inference": "SERVING",
        "no.Such": "NOT_FOUND",
    }
    assert got["watched"] == "SERVING"
    assert got["text"] == prompts[0].expected_reply
    assert got["num_ids"] == got["usage"] == got["receipt"]["output_tokens"] > 4


async def test_api_keys(stubs: Any, tmp_path: Path) -> None:
    """A wrong key is UNAUTHENTICATED, on every method."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    async with (
        grpc_gateway(ScriptedMesh(), KeyRing(path)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await read(Client(channel, stubs, "secret").start(text="a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(Client(channel, stubs, "wrong").start(text="a"))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
