"""Bad input against one mesh of real processes: each piece costs its sender a typed error with a
sentence that helps, and nobody else anything.

Requests over HTTP and gRPC, fuzzed messages to every method of every service, random bytes to every
port; after each campaign the mesh must answer exactly, hold nothing, and be the same processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from grpclib.const import Status

from shared import wire
from shared.address import Address
from shared.messages import codec
from shared.messages.columns import pack_u32, pack_u64
from shared.request import SamplingParams
from shared.rpc.methods import (
    CHANGE_ROLE,
    GENERATE,
    LIST_MODELS,
    MESH_PROVE,
    REGISTRY_JOIN,
    TOKENIZE,
    TRANSFER_PAIR,
    WORKER_SESSION,
    Method,
)
from shared.rpc.status import ERROR_TRAILER
from tests.support.calls import ALL_METHODS
from tests.support.fuzz import a_fuzzed_call
from tests.support.process_mesh import (
    ProcessMesh,
    a_prompt,
    fake_ids,
    fake_model,
    process_mesh,
)
from tests.support.raw_http2 import RawClient, framed, raw_client
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

OPEN_METHODS = [method for method in ALL_METHODS if method is not MESH_PROVE]
"""What a mesh without a secret serves; the other one is in test_strangers.py."""

ANSWERS_WITHIN_S = 30.0
CONTEXT = 512
NUM_BLOCKS = 20
BLOCK_SIZE = 16
WORKER = {"max_model_len": CONTEXT, "block_size": BLOCK_SIZE}


@dataclass
class Target:
    """The mesh under attack."""

    mesh: ProcessMesh
    gateway: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    pids: list[int]

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.gateway, self.prefill, self.decode]

    def __post_init__(self) -> None:
        self.workers = itertools.cycle((self.prefill, self.decode))

    def address(self, method: Method[Any, Any]) -> Address:
        """Where a method is served; of several workers the next one."""
        process, port = {
            "Worker": (next(self.workers), "grpc_port"),
            "Transfer": (self.decode, "grpc_port"),
            "Registry": (self.gateway, "mesh_port"),
        }.get(method.service.rpartition(".")[2], (self.gateway, "grpc_port"))
        return Address("127.0.0.1", process.facts[port])

    async def num_tasks(self) -> list[float]:
        return [(await self.mesh.gauges(process))["asyncio_tasks"] for process in self.processes]

    async def require_unharmed(self) -> None:
        """The same processes answer exactly and hold nothing, and no bug of ours has shown."""
        prompt = a_prompt(100, start=random.randrange(1000))
        ids, _ = await self.mesh.ask_grpc(self.gateway, prompt, 20)
        assert ids == fake_ids(prompt, 20, max_model_len=CONTEXT)
        await self.mesh.home([self.gateway], [self.prefill, self.decode])
        assert all(process.is_alive for process in self.processes)
        assert [process.pid for process in self.processes] == self.pids
        bugs = [line for p in self.processes for line in p.log if '"level":"error"' in line]
        assert bugs == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[Target]:
    """One gateway, one prefill and one decode worker."""
    async with process_mesh(has_secret=False) as mesh:  # strangers get as far as they can
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill = await mesh.start("prefill", **WORKER)
            decode = await mesh.start("decode", num_blocks=NUM_BLOCKS, **WORKER)
            await mesh.ready(prefill, decode)
            await mesh.paired(gateway, 1)
            await mesh.usable(gateway, 2)
            target = Target(mesh, gateway, prefill, decode, [])
            target.pids = [process.pid for process in target.processes]
            tasks = await target.num_tasks()
            yield target

            async def has_no_task_more() -> bool:
                return await target.num_tasks() == tasks

            await mesh.until(has_no_task_more)


@pytest_asyncio.fixture(loop_scope="module")
async def target(started: Target) -> AsyncIterator[Target]:
    """The mesh; it must be unharmed after the test."""
    with started.mesh.explained():
        yield started
        await started.require_unharmed()


# --- HTTP ---------------------------------------------------------------------------------------

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETION, {"prompt": "a", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HI, "max_tokens": 2, **fields}


BAD_REQUESTS: dict[str, tuple[tuple[str, Any], int, str, str | None]] = {
    # what: (path and body, status, code, param)
    "unknown model": (completion(model="gpt-9"), 404, "model_not_found", "model"),
    "unknown model, chat": (chat(model="gpt-9"), 404, "model_not_found", "model"),
    "no such route": (("/v1/embeddings", {}), 404, "route_not_found", None),
    "empty body": ((COMPLETION, b""), 400, "invalid_json", None),
    "half a JSON": ((COMPLETION, b'{"prompt": '), 400, "invalid_json", None),
    "an array": ((COMPLETION, b"[]"), 400, "invalid_request", None),
    "not UTF-8": ((COMPLETION, b'{"prompt": "\xff\xfe"}'), 400, "invalid_json", None),
    "NaN": ((COMPLETION, b'{"prompt": "a", "temperature": NaN}'), 400, "invalid_json", None),
    "1e400": ((COMPLETION, b'{"prompt": "a", "top_p": 1e400}'), 400, "invalid_request", "top_p"),
    "nested": ((COMPLETION, b'{"a":' + b"[" * 100_000), 400, "invalid_json", None),
    "body too large": ((COMPLETION, b" " * (5 << 20)), 413, "body_too_large", None),
    "no prompt": ((COMPLETION, {}), 400, "invalid_request", "prompt"),
    "prompt is a number": (completion(prompt=5), 400, "invalid_request", "prompt"),
    "prompt of fractions": (completion(prompt=[1.5]), 400, "invalid_request", "prompt[0]"),
    "prompt of no tokens": (completion(prompt=[]), 400, "invalid_request", "prompt"),
    "unknown token": (completion(prompt=[1 << 30]), 400, "bad_token_id", "prompt"),
    "negative token": (completion(prompt=[-1]), 400, "bad_token_id", "prompt"),
    "prompt too long": (
        completion(prompt=[5] * 600), 400, "context_length_exceeded", "prompt",
    ),
    "answer too long": (
        completion(max_tokens=CONTEXT), 400, "context_length_exceeded", "max_tokens",
    ),
    "no worker holds it": (
        completion(prompt=[5] * 400), 400, "context_length_exceeded", "prompt",
    ),
    "too many prompts": (completion(prompt=["a"] * 513), 400, "invalid_request", "prompt"),
    "max_tokens is text": (completion(max_tokens="9"), 400, "invalid_request", "max_tokens"),
    "max_tokens negative": (completion(max_tokens=-1), 400, "invalid_request", "max_tokens"),
    "max_tokens huge": (completion(max_tokens=1 << 70), 400, "invalid_request", "max_tokens"),
    "n negative": (completion(n=-1), 400, "invalid_request", "n"),
    "n huge": (completion(n=1_000_000_000), 400, "invalid_request", "n"),
    "temperature negative": (completion(temperature=-1), 400, "invalid_request", "temperature"),
    "top_p zero": (completion(top_p=0), 400, "invalid_request", "top_p"),
    "top_k negative": (completion(top_k=-2), 400, "invalid_request", "top_k"),
    "logprobs huge": (completion(logprobs=21), 400, "invalid_request", "logprobs"),
    "seed too wide": (completion(seed=1 << 64), 400, "invalid_request", "seed"),
    "penalty": (completion(frequency_penalty=9), 400, "invalid_request", "frequency_penalty"),
    "stop: 1,000 entries": (
        completion(stop=[str(i) for i in range(1000)]), 400, "invalid_request", "stop",
    ),
    "stop: a megabyte": (completion(stop="x" * (1 << 20)), 400, "invalid_request", "stop"),
    "stop: empty text": (completion(stop=[""]), 400, "invalid_request", "stop"),
    "stop_token_ids": (
        completion(stop_token_ids=[-5]), 400, "bad_token_id", "stop_token_ids",
    ),
    "bias of 1,000": (
        completion(logit_bias={str(i): 1 for i in range(1000)}), 400, "invalid_request",
        "logit_bias",
    ),
    "bias of no token": (completion(logit_bias={"x": 1}), 400, "invalid_request", "logit_bias"),
    "salt": (completion(cache_salt="a b\n"), 400, "invalid_request", "cache_salt"),
    "beam search": (completion(use_beam_search=True), 400, "unsupported", "use_beam_search"),
    "messages is text": (chat(messages="hi"), 400, "invalid_request", "messages"),
    "no messages": (chat(messages=[]), 400, "invalid_request", "messages"),
    "a picture": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "unsupported",
        "messages[0].content[0]",
    ),
    "odd role": (
        chat(messages=[{"role": "Us er", "content": "a"}]), 400, "unsupported",
        "messages[0].role",
    ),
    "tools": (chat(tools=[{}]), 400, "invalid_request", "tools[0].function"),
    "tokenize nothing": (("/tokenize", {}), 400, "invalid_request", "prompt"),
    "detokenize nonsense": (("/detokenize", {"tokens": [-1]}), 400, "bad_token_id", "tokens"),
}  # fmt: skip

BAD_HEADERS: dict[str, tuple[dict[str, str], int, str | None]] = {
    "timeout is text": ({"X-Request-Timeout": "soon"}, 400, "x-request-timeout"),
    "timeout negative": ({"X-Request-Timeout": "-1"}, 400, "x-request-timeout"),
    "compressed": ({"Content-Encoding": "gzip"}, 400, "content-encoding"),
    "a header of 20 KB": ({"X-Long": "x" * 20_000}, 400, None),
}


async def test_bad_requests_over_http_are_typed_and_name_their_field(target: Target) -> None:
    """A status, a code, the field at fault and a sentence; never a word of our insides."""
    url = f"http://127.0.0.1:{target.gateway.facts['http_port']}"
    async with aiohttp.ClientSession() as session:

        async def require(
            path: str, body: Any, headers: dict[str, str], status: int, param: str | None
        ) -> str:
            data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
            async with session.post(url + path, data=data, headers=headers) as response:
                answer = json.loads(await response.read())
                assert response.status == status, answer
            assert set(answer) == {"error"}
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, error
            assert len(error["message"].split()) >= 3, error
            assert "Traceback" not in error["message"]
            return error["code"]

        for what, ((path, body), status, code, param) in BAD_REQUESTS.items():
            for stream in (False, True) if isinstance(body, dict) else (False,):
                asked = {**body, "stream": True} if stream else body
                try:
                    assert await require(path, asked, {}, status, param) == code
                except AssertionError as error:
                    error.add_note(what)
                    raise
        for what, (headers, status, param) in BAD_HEADERS.items():
            try:
                await require(*completion(), headers, status, param)
            except AssertionError as error:
                error.add_note(what)
                raise


# --- gRPC ---------------------------------------------------------------------------------------


def generate(**fields: Any) -> wire.GenerateRequest:
    return wire.GenerateRequest(**fields)


def sampled(**params: Any) -> wire.GenerateRequest:
    return generate(text="a", params=wire.GenerateParams(**params))


BAD_CALLS: dict[str, tuple[wire.GenerateRequest, Status, str]] = {
    "no prompt": (generate(), Status.INVALID_ARGUMENT, "text"),
    "two prompts": (generate(text="a", token_ids=b"1234"), Status.INVALID_ARGUMENT, "text"),
    "half a token": (generate(token_ids=b"12345"), Status.INVALID_ARGUMENT, "token_ids"),
    "unknown token": (
        generate(token_ids=pack_u32([1 << 31])), Status.INVALID_ARGUMENT, "token_ids",
    ),
    "too long": (generate(token_ids=pack_u32([5] * 600)), Status.INVALID_ARGUMENT, "token_ids"),
    "no worker holds it": (
        generate(token_ids=pack_u32([5] * 400)), Status.INVALID_ARGUMENT, "token_ids",
    ),
    "model": (generate(text="a", model="gpt-9"), Status.NOT_FOUND, "model"),
    "label": (generate(text="a", request_label="a b"), Status.INVALID_ARGUMENT, "request_label"),
    "max_tokens": (sampled(max_tokens=0), Status.INVALID_ARGUMENT, "max_tokens"),
    "temperature": (sampled(temperature=math.nan), Status.INVALID_ARGUMENT, "temperature"),
    "top_p": (sampled(top_p=math.inf), Status.INVALID_ARGUMENT, "top_p"),
    "logprobs": (sampled(logprobs=1 << 31), Status.INVALID_ARGUMENT, "logprobs"),
    "stop": (sampled(stop=["x"] * 1000), Status.INVALID_ARGUMENT, "stop"),
    "bias": (
        sampled(logit_bias={1 << 31: 1.0}), Status.INVALID_ARGUMENT, "logit_bias",
    ),
    "of a later release": (
        generate(text="a", params=wire.GenerateParams.parse(b"\xf8\x7f\x01")),
        Status.INVALID_ARGUMENT, "2047",
    ),
}  # fmt: skip


@pytest.mark.quick
async def test_bad_requests_over_grpc_are_typed_and_name_their_field(target: Target) -> None:
    """A status, and the typed error as JSON in a trailer."""
    async with raw_client(target.address(GENERATE)) as client:
        for what, (request, status, param) in BAD_CALLS.items():
            found = await client.call(client.headers(GENERATE.path), framed(bytes(request)))
            assert found["grpc-status"] == str(status.value), (what, found)
            error = json.loads(found[ERROR_TRAILER])
            assert error["param"] == param, (what, found)
            assert len(error["message"].split()) >= 3, (what, found)
        found = await client.call(client.headers("/pdmesh.v1.Inference/Guess"), framed(b""))
        assert found["grpc-status"] == str(Status.UNIMPLEMENTED.value)


# --- fuzzed messages ----------------------------------------------------------------------------

OUR_BUGS = {str(Status.UNKNOWN.value), str(Status.INTERNAL.value)}
CALLS_A_METHOD = 150
CALLS_A_CONNECTION = 25


def hello(role: wire.Role) -> wire.Hello:
    return wire.Hello(
        protocol_version=codec.PROTOCOL_VERSION, role=role, incarnation=0xBAD, version="fuzz"
    )


def honest_calls() -> dict[str, list[list[Any]]]:
    """By path: calls that would be served, message by message."""
    model = fake_model(max_model_len=CONTEXT)
    prompt = range(5, 40)
    work: dict[str, Any] = {
        "stream_id": 1,
        "request_id": bytes(range(16)),
        "token_ids": pack_u32(prompt),
        "num_prompt_tokens": len(prompt),
        "sampling": codec.sampling_to_wire(
            SamplingParams(max_tokens=9, seed=3, stop_token_ids=(7,), logit_bias=((8, 1.0),))
        ),
        "deadline_s": 1.0,
        "lease_token": bytes(range(16)),
    }
    what = {"model": codec.model_to_wire(model.spec), "layout": codec.layout_to_wire(model.layout)}
    announce = wire.WorkerAnnounce(
        hello=hello(wire.Role.DECODE), host="127.0.0.1", port=9, num_blocks=9, block_size=9, **what
    )
    pair = wire.PairHello(
        hello=hello(wire.Role.PREFILL),
        transport_address=bytes(64),
        group_bytes=1 << 20,
        max_frame_bytes=8 << 20,
        **what,
    )
    few = wire.GenerateParams(max_tokens=2, temperature=0.5, logit_bias={9: 0.5}, stop=["x"])
    messages = [wire.ChatMessage(role="user", content="hi")]
    return {
        GENERATE.path: [
            [wire.GenerateRequest(text="hello there", params=few)],
            [wire.GenerateRequest(token_ids=pack_u32(prompt), request_label="a", params=few)],
            [wire.GenerateRequest(messages=messages, params=few)],
        ],
        TOKENIZE.path: [[wire.TokenizeRequest(text="hello")], [
            wire.TokenizeRequest(messages=messages)]],
        LIST_MODELS.path: [[wire.ListModelsRequest()]],
        CHANGE_ROLE.path: [[wire.ChangeRoleRequest(worker="ff" * 8, role="token")]],
        REGISTRY_JOIN.path: [[
            wire.WorkerReport(announce=announce),
            wire.WorkerReport(status=wire.WorkerStatus(free_blocks=3, paired=pack_u64([5]))),
        ]],
        WORKER_SESSION.path: [
            [
                wire.WorkerCommand(hello=hello(wire.Role.GATEWAY)),
                wire.WorkerCommand(order=wire.WorkOrder(**work, role=role, **more)),
                wire.WorkerCommand(heartbeat=wire.Heartbeat()),
                wire.WorkerCommand(cancel=wire.CancelOrder(stream_id=1)),
            ]
            for role, more in (
                (wire.Role.PREFILL, {}),
                (wire.Role.DECODE, {"wait_s": 0.1, "peer_incarnation": 0xBAD}),
            )
        ],
        TRANSFER_PAIR.path: [[
            wire.PairMessage(hello=pair),
            wire.PairMessage(open=wire.OpenTransfer(
                request_id=bytes(range(16)), lease_token=bytes(range(16)))),
        ]],
    }  # fmt: skip


@pytest.mark.parametrize("method", OPEN_METHODS, ids=lambda method: method.path)
async def test_fuzzed_messages_to_any_method_are_refused_or_served(
    target: Target, method: Method[Any, Any]
) -> None:
    """Every call ends with a status, and never with one that stands for our own bugs."""
    source = random.Random(method.path)
    honest = honest_calls()[method.path]
    seen: dict[str, int] = {}
    for _ in range(CALLS_A_METHOD // CALLS_A_CONNECTION):
        async with raw_client(target.address(method)) as client:
            for _ in range(CALLS_A_CONNECTION):
                data = a_fuzzed_call(source, honest)
                async with asyncio.timeout(ANSWERS_WITHIN_S):
                    found = await client.call(client.headers(method.path), data)
                status = found.get("grpc-status", "none")
                assert status not in {"none", *OUR_BUGS}, (data, found)
                seen[status] = seen.get(status, 0) + 1
    assert seen[str(Status.INVALID_ARGUMENT.value)] > CALLS_A_METHOD // 5, seen


async def test_a_flood_of_damaged_calls_at_once(target: Target) -> None:
    """Many connections, every method on each, nobody waits for answers in turn."""
    source = random.Random(9)
    honest = honest_calls()

    async def attack(method: Method[Any, Any], calls: list[bytes]) -> None:
        async with raw_client(target.address(method)) as client:
            streams = [_send(client, method, data) for data in calls]
            await client.flush()
            for stream_id in streams:
                assert "grpc-status" in await client.answer(stream_id)

    async with asyncio.timeout(ANSWERS_WITHIN_S), asyncio.TaskGroup() as tasks:
        for method in OPEN_METHODS * 4:
            calls = [a_fuzzed_call(source, honest[method.path]) for _ in range(10)]
            tasks.create_task(attack(method, calls))


def _send(client: RawClient, method: Method[Any, Any], data: bytes) -> int:
    stream_id = client.h2.get_next_available_stream_id()
    client.h2.send_headers(stream_id, client.headers(method.path))
    client.h2.send_data(stream_id, data, end_stream=True)
    return stream_id


# --- random bytes -------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TLS_HELLO = bytes.fromhex("16030100f1010000ed0303")
BEGINNINGS = (b"", PREFACE, TLS_HELLO, b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n")


async def test_random_bytes_to_any_port_harm_nobody(target: Target) -> None:
    """HTTP, gRPC, metrics, and the ports that UCX opens: connections that end in every way."""
    source = random.Random(4)
    num_files = [process.num_files for process in target.processes]

    async def attack(address: tuple[str, int], data: bytes, *, waits: bool, aborts: bool) -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            if waits:
                writer.write_eof()
                async with asyncio.timeout(1.0):
                    while await reader.read(4096):
                        pass
        if aborts:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    num_attacked = 0
    for process in target.processes:
        ports = list(process.listening())
        num_attacked += len(ports)
        async with asyncio.timeout(ANSWERS_WITHIN_S), asyncio.TaskGroup() as tasks:
            for address in ports:
                for size in (0, 1, 9, 24, 100, 5000):
                    data = source.choice(BEGINNINGS) + source.randbytes(size)
                    waits, aborts = source.random() < 0.5, source.random() < 0.5
                    tasks.create_task(attack(address, data, waits=waits, aborts=aborts))
    assert num_attacked >= 9  # three of the gateway; gRPC, metrics and UCX's of both workers

    async def is_as_at_start() -> bool:
        return [process.num_files for process in target.processes] <= num_files

    await target.mesh.until(is_as_at_start)
