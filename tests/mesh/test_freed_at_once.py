"""What is over is freed at once: nothing of an answer, a connection, a session or a worker that is
gone waits for a garbage collection, which comes late and then holds the loop up.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from services.gateway.core.lifecycle import Lifecycle
from services.gateway.front.answers import Choice
from services.gateway.http.connection import Connection, HttpRequest
from services.gateway.http.sse import EventStream
from services.gateway.mesh import GenerationRequest, Tokens
from services.gateway.workers.session import RequestShell
from shared.engine.fake import FakeTiming
from shared.errors import Overloaded, WorkerLost
from shared.http2.connection import GuardedConnection, GuardedProtocol, GuardedStream
from shared.rpc.methods import GENERATE
from shared.rpc.service import ServerStream
from shared.rpc.stream import ClientStream, open_stream
from shared.transfer.orders import Order
from tests.support.garbage import left_by
from tests.support.http_client import memory_link
from tests.support.memory_http import MemoryLink
from tests.support.scripted_mesh import Script, ScriptedMesh, failing_after, saying
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt, worker_mesh

OF_HTTP = (Connection, HttpRequest, EventStream, Choice)
OF_GRPC = (GuardedProtocol, GuardedConnection, GuardedStream, ServerStream, ClientStream)
OF_A_REQUEST = (RequestShell, Lifecycle, Choice)

FRAMES_KEEP_CALLERS = pytest.mark.xfail(
    sys.version_info >= (3, 12),
    reason="an error keeps the frames that it came through, and one of a coroutine that is over "
    "who awaited it (CPython 3.12.1, 3.13.0)",
    strict=False,
)

# --- over HTTP ------------------------------------------------------------------------------------

ASKED = {"prompt": "a", "max_tokens": 20}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GONE: list[Script] = [failing_after(text, WorkerLost("gone")) for text in ("", "hello")]
BROKEN: list[Script] = [failing_after(text, ValueError("a bug")) for text in ("", "hello")]


def post(**fields: Any) -> bytes:
    body = json.dumps({**ASKED, **fields}).encode()
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def anew(script: Script) -> Script:
    """A script whose error is another one each time, as those of workers are."""

    async def played(request: GenerationRequest) -> AsyncGenerator[Tokens]:
        try:
            async for tokens in script(request):
                yield tokens
        except Exception as failure:
            raise type(failure)(*failure.args) from None

    return played


@pytest.mark.parametrize("leaves", [False, True], ids=["expires", "leaves"])
@pytest.mark.parametrize(
    ("sent", "script"),
    [
        pytest.param(b"", None, id="nothing"),
        pytest.param(POST[:20], None, id="half a head"),
        pytest.param(b"no HTTP\r\n\r\n", None, id="no HTTP"),
        pytest.param(post()[:-3], None, id="half a body"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\nxx", None, id="a broken body"),
        pytest.param(POST + b"Content-Length: 99999999\r\n\r\nx", None, id="a body too large"),
        pytest.param(post(temperature=9), None, id="a refused field"),
        pytest.param(post() * 3, None, id="whole answers"),
        pytest.param(post(stream=True) * 3, None, id="streams"),
        pytest.param(post(stream=True, n=3), None, id="a stream of three"),
        pytest.param(post(), GONE[0], id="no answer"),
        pytest.param(post(stream=True), GONE[0], id="no stream"),
        pytest.param(post(stream=True), GONE[1], id="half a stream"),
        pytest.param(
            *(post(stream=True, n=3), GONE[1]),
            id="half a stream of three",
            marks=FRAMES_KEEP_CALLERS,
        ),
        pytest.param(post(), BROKEN[0], id="a bug"),
        pytest.param(post(stream=True), BROKEN[1], id="a bug amid a stream"),
    ],
)
@virtual_time
async def test_a_connection_leaves_nothing(
    sent: bytes, script: Script | None, leaves: bool
) -> None:
    """Whatever came of its requests, and whether its client closes it or we do."""
    mesh = ScriptedMesh(saying("hello and the end") if script is None else anew(script))
    async with memory_link(mesh) as first:

        async def ending() -> None:
            link = MemoryLink(first.door)
            link.say(sent)
            await asyncio.sleep(0.1)
            if leaves:
                link.close()
            await link.reader.read()
            await link.closed.wait()
            mesh.requests.clear()

        assert not await left_by(ending, OF_HTTP)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 3}])
@virtual_time
async def test_a_client_that_leaves_amid_an_answer_leaves_nothing(fields: dict[str, Any]) -> None:
    """Its answers are cancelled."""
    mesh = ScriptedMesh()
    async with memory_link(mesh) as first:

        async def ending() -> None:
            mesh.script = saying("hello and the end", gate=asyncio.Semaphore(1))
            link = MemoryLink(first.door)
            link.say(post(**fields))
            await mesh.wait_running(fields.get("n", 1))
            await asyncio.sleep(0.1)
            link.close()
            await mesh.wait_running(0)
            mesh.requests.clear()

        assert not await left_by(ending, OF_HTTP)


# --- over gRPC, and between services --------------------------------------------------------------

Ending = Callable[[WholeMesh, list[Any]], Awaitable[Any]]
"""The list keeps what is a process of its own, whose memory ends with it."""


async def answered(mesh: WholeMesh, _: list[Any]) -> None:
    """An answer, whole."""
    assert (await mesh.ask(a_prompt(20), 8)).error is None


async def told_apart(mesh: WholeMesh, _: list[Any]) -> None:
    """The answer to a chat."""
    assert (await mesh.ask("hi", 8)).error is None


async def hung_up(mesh: WholeMesh, _: list[Any]) -> None:
    """The client cancels."""
    await mesh.ask(a_prompt(20), 50, leave_after=3)


async def cut(mesh: WholeMesh, _: list[Any]) -> None:
    """The client's connection breaks."""
    asyncio.get_running_loop().call_later(0.1, mesh.network.fabric.kill, "client")
    assert (await mesh.ask(a_prompt(20), 200)).error is not None


async def late(mesh: WholeMesh, _: list[Any]) -> None:
    """The deadline passes."""
    assert (await mesh.ask(a_prompt(20), 300, timeout_s=0.2)).error is not None


async def refused(mesh: WholeMesh, _: list[Any]) -> None:
    """The request is wrong."""
    assert (await mesh.ask(a_prompt(20), 8, temperature=9.0)).error is not None


async def mute(mesh: WholeMesh, _: list[Any]) -> None:
    """The call brings no request."""
    address = mesh.gateways[0].address
    async with (
        mesh.network.at("client").channel(address) as channel,
        open_stream(channel, GENERATE),
    ):
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    "ending", [answered, told_apart, hung_up, cut, late, refused, mute], ids=lambda it: it.__name__
)
@virtual_time
async def test_a_call_leaves_nothing(ending: Ending) -> None:
    """Nor does its connection, at either end."""
    async with whole_mesh() as mesh:
        assert not await left_by(lambda: ending(mesh, []), (*OF_GRPC, *OF_A_REQUEST), settle_s=5.0)


@virtual_time
async def test_a_reservation_that_is_refused_leaves_nothing() -> None:
    """What refuses its open, should one come, keeps no order: a prompt may be long."""
    settings = {"max_requests": 1}
    async with worker_mesh(decode=settings, timing=FakeTiming(base_s=0.5)) as mesh:
        running = mesh.start(a_prompt(30), 200)
        await running.until(lambda it: it.joined)

        async def ending() -> None:
            request = mesh.start(a_prompt(30, seed=2), legs="d")
            await mesh.gateway.until(lambda: request.errors)
            assert isinstance(request.errors[0], Overloaded)

        assert not await left_by(ending, (Order,))
        running.cancel()


async def worker_killed(mesh: WholeMesh, kept: list[Any]) -> None:
    """Amid an answer, which another worker finishes."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(mesh.ask(a_prompt(20), 30))
        await asyncio.sleep(0.15)
        kept.append(victim := mesh.decodes.pop())
        await mesh.kill(victim)
    assert asked.result().error is None
    await mesh.start_worker("decode")
    await mesh.ready()


async def prefill_killed(mesh: WholeMesh, kept: list[Any]) -> None:
    """Amid a prompt."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(mesh.ask(a_prompt(200), 30))
        await asyncio.sleep(0.03)
        kept.append(victim := mesh.prefills.pop())
        await mesh.kill(victim)
    assert asked.result().error is None
    await mesh.start_worker("prefill")
    await mesh.ready()


async def silent(mesh: WholeMesh, _: list[Any]) -> None:
    """A worker is not heard by its gateway for a while."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(mesh.ask(a_prompt(20), 30))
        await asyncio.sleep(0.15)
        mesh.network.fabric.partition(mesh.decodes[0].host, mesh.gateways[0].host)
        await asyncio.sleep(10.0)
    assert asked.result().error is None
    mesh.network.fabric.heal()
    await mesh.ready()


async def unpaired(mesh: WholeMesh, _: list[Any]) -> None:
    """Two workers do not hear each other for a while."""
    mesh.network.fabric.partition(mesh.prefills[0].host, mesh.decodes[0].host)
    assert (await mesh.ask(a_prompt(200), 30)).error is None
    await asyncio.sleep(10.0)
    mesh.network.fabric.heal()
    await mesh.ready()


async def gateway_killed(mesh: WholeMesh, kept: list[Any]) -> None:
    """Another gateway than the one that stays, amid an answer."""
    await mesh.start_gateway()
    await mesh.ready()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(mesh.ask(a_prompt(20), 100, gateway=1))
        await asyncio.sleep(0.15)
        kept.append(victim := mesh.gateways.pop())
        await mesh.kill(victim)
    assert asked.result().error is not None
    mesh.network.fabric.set_name("gateways", [mesh.gateways[0].host])


@pytest.mark.slow
@FRAMES_KEEP_CALLERS
@pytest.mark.parametrize(
    "ending",
    [worker_killed, prefill_killed, silent, unpaired, gateway_killed],
    ids=lambda it: it.__name__,
)
@virtual_time
async def test_a_service_that_is_lost_leaves_nothing_with_the_others(ending: Ending) -> None:
    """Neither its sessions, pairs and joins nor the requests that went over them."""
    kept: list[Any] = []
    timing = FakeTiming(base_s=0.01, prefill_token_s=0.0005)
    async with whole_mesh(num_prefill=2, num_decode=2, timing=timing) as mesh:
        left = await left_by(lambda: ending(mesh, kept), OF_A_REQUEST, settle_s=100.0)
        assert not left
