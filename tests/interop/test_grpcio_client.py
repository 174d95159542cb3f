"""Google's own gRPC client against our server: what any other client will find.

The client is grpcio's blocking one in a thread, so that two event systems never share a thread.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from shared import wire
from shared.rpc.call_server import CallServer
from shared.rpc.tcp import TcpNetwork
from tests.support.echo_service import EchoService, echo_server

GENERATE = "/pdmesh.v1.Inference/Generate"
TOKENIZE = "/pdmesh.v1.Inference/Tokenize"
SESSION = "/pdmesh.v1.Worker/Session"
LIMIT_S = 30.0


@pytest.fixture
async def served() -> AsyncIterator[tuple[EchoService, CallServer]]:
    async with echo_server(TcpNetwork()) as pair:
        yield pair


async def ask_grpcio(server: CallServer, work: Callable[[grpc.Channel], Any]) -> Any:
    """Run ``work(channel)`` in a thread."""

    def run() -> Any:
        with grpc.insecure_channel(str(server.address)) as channel:
            return work(channel)

    return await asyncio.to_thread(run)


def unary(channel: grpc.Channel) -> Any:
    return channel.unary_unary(TOKENIZE, bytes, wire.TokenizeResponse.parse)


def generate(channel: grpc.Channel) -> Any:
    return channel.unary_stream(GENERATE, bytes, wire.GenerateResponse.parse)


def ask(text: str) -> wire.GenerateRequest:
    return wire.GenerateRequest(text=text)


@pytest.mark.quick
async def test_unary_and_streams(served: tuple[EchoService, CallServer]) -> None:
    """A unary call, a server stream with trailers and a bidirectional stream all work."""
    service, server = served

    def work(channel: grpc.Channel) -> None:
        reply = unary(channel)(wire.TokenizeRequest(text="abc"), timeout=LIMIT_S)
        assert reply.token_ids == b"abc"
        call = generate(channel)(
            ask("count:500"), timeout=LIMIT_S, metadata=(("x-request-id", "r1"),)
        )
        assert [message.first_index for message in call] == list(range(500))
        assert dict(call.trailing_metadata())["pdmesh-receipt"] == '{"ttft_s":1}'

        session = channel.stream_stream(SESSION, bytes, wire.WorkerEvent.parse)
        commands: Iterator[wire.WorkerCommand] = (
            wire.WorkerCommand(order=wire.WorkOrder(stream_id=number)) for number in range(50)
        )
        granted = [event.granted for event in session(commands, timeout=LIMIT_S)]
        assert [grant.stream_id for grant in granted if grant is not None] == list(range(50))

    await ask_grpcio(server, work)
    assert service.metadata["x-request-id"] == "r1"


async def test_typed_error_is_status_message_and_trailer(
    served: tuple[EchoService, CallServer],
) -> None:
    """A MeshError is a gRPC status, its sentence the details, and its fields a JSON trailer."""

    def work(channel: grpc.Channel) -> None:
        for text, code, kind, message in (
            ("refuse", grpc.StatusCode.UNAVAILABLE, "overloaded", "too much at once, wörld\n"),
            ("late:3", grpc.StatusCode.UNAVAILABLE, "no_blocks", "no room left"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(generate(channel)(ask(text), timeout=LIMIT_S))
            error: Any = caught.value
            assert (error.code(), error.details()) == (code, message)
            record = json.loads(dict(error.trailing_metadata())["pdmesh-error"])
            assert (record["type"], record["message"]) == (kind, message)

    await ask_grpcio(served[1], work)


async def test_bug_is_internal_and_says_nothing(served: tuple[EchoService, CallServer]) -> None:
    """An unexpected exception of ours is INTERNAL, without its text."""

    def work(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(channel)(ask("bug"), timeout=LIMIT_S))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in f"{error.details()}{error.trailing_metadata()}"

    await ask_grpcio(served[1], work)


async def test_deadline_reaches_the_handler(served: tuple[EchoService, CallServer]) -> None:
    """The client's timeout is the handler's deadline, and ends both.

    gRPC's C core rounds a timeout up to whole milliseconds on its way: 1.0 may arrive as 1.001.
    """
    service, server = served

    def work(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            list(generate(channel)(ask("wait"), timeout=1.0))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    await ask_grpcio(server, work)
    await service.ended.wait()
    assert service.remaining_s is not None
    assert 0 <= service.remaining_s <= 1.01


async def test_cancel_reaches_the_handler(served: tuple[EchoService, CallServer]) -> None:
    """A cancelled call cancels its handler."""
    service, server = served
    is_started = threading.Event()

    def work(channel: grpc.Channel) -> None:
        call = generate(channel)(ask("wait"), timeout=LIMIT_S)
        assert is_started.wait(LIMIT_S)
        call.cancel()

    async def watch() -> None:
        await service.started.wait()
        is_started.set()
        await service.ended.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        await ask_grpcio(server, work)
    assert service.num_cancelled == 1


async def probe(server: CallServer, *names: str) -> dict[str, Any]:
    """Run the foreign client (``grpcio_probe``) against the server."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.grpcio_probe", str(server.address), *names),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output)


@pytest.mark.quick
@pytest.mark.process
async def test_health_follows_readiness(served: tuple[EchoService, CallServer]) -> None:
    """The standard health service speaks for the process and for each service; unknown ones are
    NOT_FOUND."""
    server = served[1]
    names = ("pdmesh.v1.Inference", "pdmesh.v1.Worker", "pdmesh.v1.Nothing")
    good = {"": "SERVING", names[0]: "SERVING", names[1]: "SERVING", names[2]: "NOT_FOUND"}
    assert (await probe(server, *names))["health"] == good
    server.set_ready(False)
    assert (await probe(server, *names))["health"][""] == "NOT_SERVING"
    server.set_ready(True)
    assert await server.drain(1.0)
    check = "/grpc.health.v1.Health/Check"

    def work(channel: grpc.Channel) -> bytes:
        return channel.unary_unary(check, bytes, bytes)(b"", timeout=LIMIT_S)

    assert await ask_grpcio(server, work) == b"\x08\x02"  # status: NOT_SERVING


@pytest.mark.process
async def test_reflection_describes_every_service(served: tuple[EchoService, CallServer]) -> None:
    """Reflection lists our services and hands out descriptors that suffice to make a call."""
    found = await probe(served[1])
    assert {"pdmesh.v1.Inference", "pdmesh.v1.Worker"} <= set(found["services"])
    assert found["reflected"] == "abc"


async def test_300_calls_at_once_on_one_channel(served: tuple[EchoService, CallServer]) -> None:
    """Three hundred streams of one grpcio channel are open at the same time."""
    service, server = served

    def work(channel: grpc.Channel) -> list[str]:
        calls = [generate(channel)(ask("linger"), timeout=LIMIT_S) for _ in range(300)]
        return [message.text for call in calls for message in call]

    async def release() -> None:
        while service.num_started < 300:
            service.started.clear()
            await service.started.wait()
        service.released.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(release())
        answers = await ask_grpcio(server, work)
    assert answers == ["released"] * 300


async def test_drain_lets_a_running_call_finish(served: tuple[EchoService, CallServer]) -> None:
    """While the server drains, a running grpcio call ends well and a new one is UNAVAILABLE."""
    service, server = served
    may_call = threading.Event()

    def work(channel: grpc.Channel) -> list[str]:
        running = generate(channel)(ask("linger"), timeout=LIMIT_S)
        assert may_call.wait(LIMIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            unary(channel)(wire.TokenizeRequest(), timeout=LIMIT_S)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting_down" in dict(error.trailing_metadata())["pdmesh-error"]
        service_loop.call_soon_threadsafe(service.released.set)
        return [message.text for message in running]

    async def drain() -> None:
        await service.started.wait()
        draining = tasks.create_task(server.drain(LIMIT_S))
        await asyncio.sleep(0)
        may_call.set()
        assert await draining is True

    service_loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(drain())
        assert await ask_grpcio(server, work) == ["released"]


async def test_compressed_message_is_refused(served: tuple[EchoService, CallServer]) -> None:
    """A client that compresses is told so."""

    def work(channel: grpc.Channel) -> None:
        call = channel.unary_unary(TOKENIZE, bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(
                wire.TokenizeRequest(text="a" * 1000),
                timeout=LIMIT_S,
                compression=grpc.Compression.Gzip,
            )
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "compressed" in error.details()

    await ask_grpcio(served[1], work)


async def test_large_message_is_refused_and_the_next_works(
    served: tuple[EchoService, CallServer],
) -> None:
    """A request of 5 MiB is RESOURCE_EXHAUSTED; the channel goes on."""

    def work(channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            unary(channel)(wire.TokenizeRequest(text="x" * (5 << 20)), timeout=LIMIT_S)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert unary(channel)(wire.TokenizeRequest(text="y"), timeout=LIMIT_S).token_ids == b"y"

    await ask_grpcio(served[1], work)
