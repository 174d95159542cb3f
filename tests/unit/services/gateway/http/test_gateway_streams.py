"""Streams of the HTTP door: their bytes, their timing, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from services.gateway.front.answers import AT_ONCE
from services.gateway.http.connection import Connection
from services.gateway.http.openai_answers import CompletionFormat
from services.gateway.mesh import Tokens
from shared.errors import Overloaded
from tests.support.answer_tokens import answer_tokens
from tests.support.http_client import gateway, parse_events, post_bytes, raw_connection
from tests.support.scripted_mesh import (
    ScriptedMesh,
    http_gateway,
    saying,
)


async def test_headers_and_first_token_leave_together_and_no_later_than_it() -> None:
    """The first bytes hold the first token, and arrive while the second is still to come."""
    gate = asyncio.Semaphore(1)
    mesh = ScriptedMesh(saying("the and", per_batch=1, gate=gate))
    async with http_gateway(mesh) as url, raw_connection(url) as (reader, writer):
        writer.write(post_bytes("/v1/completions", {"prompt": "a", "stream": True}))
        first = await reader.read(65536)
        assert b"text/event-stream" in first
        assert b'"text":"the"' in first
        for _ in range(10):
            gate.release()
        rest = await reader.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_small_events_do_not_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's end of every connection has TCP_NODELAY."""
    found: list[int] = []
    connection_made = Connection.connection_made

    def looked_at(self: Any, transport: Any) -> None:
        connection_made(self, transport)
        link = transport.get_extra_info("socket")
        found.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", looked_at)
    async with (
        http_gateway(ScriptedMesh(saying("the"))) as url,
        raw_connection(url) as (reader, writer),
    ):
        writer.write(post_bytes("/v1/completions", {"prompt": "a", "stream": True}))
        await reader.read(1)
    assert found == [1]


async def test_the_bytes_of_a_chunk() -> None:
    """A chunk is one line of compact JSON between ``data: `` and an empty line."""
    async with gateway(ScriptedMesh(saying('"\n🦊', per_batch=100))) as client:
        body = {"prompt": "a", "stream": True}
        response = await client.session.post(client.url + "/v1/completions", json=body)
        data = await response.read()
    created, label = data.split(b'"created":')[1][:10], response.headers["X-Request-Id"]
    assert data == (
        b'data: {"id":"cmpl-%s","object":"text_completion","created":%s,"model":"tiny","choices":'
        b'[{"index":0,"text":"\\"\\n\xf0\x9f\xa6\x8a","logprobs":null,"finish_reason":"stop",'
        b'"stop_reason":null}]}\n\ndata: [DONE]\n\n' % (label.encode(), created)
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_batches", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_cancels_at_once(
    stream: bool, num_batches: int, n: int
) -> None:
    """Before the first token or after it, streaming or not: the generations end without another
    token."""
    gate = asyncio.Semaphore(num_batches * n)
    mesh = ScriptedMesh(saying("the and the and", per_batch=1, gate=gate))
    async with http_gateway(mesh) as url:
        async with raw_connection(url) as (reader, writer):
            body = {"prompt": "a", "stream": stream, "n": n}
            writer.write(post_bytes("/v1/completions", body))
            await mesh.wait_running(n)
            if stream and num_batches:
                await reader.read(1)
        await mesh.wait_running(0)


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its buffer stays bounded and its generation is cancelled."""

    async def endless(_: object) -> AsyncGenerator[Tokens]:
        for index in itertools.count(0, 500):
            yield answer_tokens((100,) * 500, first=index)
            await asyncio.sleep(0)

    mesh = ScriptedMesh(endless)
    async with http_gateway(mesh, stall_s=0.05) as url, raw_connection(url) as (_, writer):
        writer.write(post_bytes("/v1/completions", {"prompt": "a", "stream": True}))
        await mesh.wait_running(1)
        await mesh.wait_running(0)


async def test_running_streams_finish_when_the_listener_closes() -> None:
    """Closing waits for what runs; its client sees the whole answer."""
    gate = asyncio.Semaphore(1)
    mesh = ScriptedMesh(saying("the and", per_batch=1, gate=gate))
    async with aiohttp.ClientSession() as session, http_gateway(mesh) as url:
        body = {"prompt": "a", "stream": True}
        response = await session.post(url + "/v1/completions", json=body)
        # From here on the listener closes, and waits for this very stream.
        asyncio.get_running_loop().call_soon(lambda: [gate.release() for _ in range(10)])
    events = parse_events(await response.read())
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_batch_runs_some_answers_at_a_time() -> None:
    """The others wait for their turn, and all come, whichever prompt each continues."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("the", gate=gate))
    num = AT_ONCE + 40
    async with gateway(mesh) as client, asyncio.TaskGroup() as tasks:
        body = {"prompt": [[5 + idx % 200] for idx in range(num)], "echo": True}
        asked = tasks.create_task(client.ask("POST", "/v1/completions", json=body))
        await mesh.wait_running(AT_ONCE)
        assert len(mesh.requests) == AT_ONCE
        for _ in range(num):
            gate.release()
        status, _, answer = await asked
        assert status == 200
        assert len(answer["choices"]) == len(mesh.requests) == num
        body = {"prompt": [[5]] * 300, "n": 2}
        status, _, answer = await client.ask("POST", "/v1/completions", json=body)
        assert (status, answer["error"]["param"]) == (400, "n")


async def test_several_answers_are_refused_together() -> None:
    """With a status, before any of them: the first one asks for a place, the others follow it."""
    mesh = ScriptedMesh(saying("the"))
    mesh.refusal = Overloaded("full", code="queue_full", retry_after_s=1.0)
    async with gateway(mesh) as client:
        body = {"prompt": "a", "n": 3, "stream": True}
        status, _, answer = await client.ask("POST", "/v1/completions", json=body)
        assert (status, answer["error"]["code"], len(mesh.requests)) == (503, "queue_full", 1)
        mesh.refusal = None
        events = await client.events("/v1/completions", body)
        assert {event["choices"][0]["index"] for event in events[:-1]} == {0, 1, 2}
        first, *others = mesh.requests[1:]
        assert first.follows == b""
        assert [it.follows for it in others] == [first.request_id] * 2


@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_prompts_logprobs_are_written_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """Thousands of them would hold up all other streams; what comes is the same."""
    wrote: set[str] = set()
    first = CompletionFormat._first  # pyright: ignore[reportPrivateUsage]

    def noted(self: Any, delta: Any) -> Any:
        wrote.add(threading.current_thread().name)
        return first(self, delta)

    monkeypatch.setattr(CompletionFormat, "_first", noted)
    asked = {"echo": True, "logprobs": 1, "seed": 1, "max_tokens": 4}
    body = {"prompt": ["the and the"] * prompts, **asked}
    told: list[Any] = []
    async with gateway(ScriptedMesh(saying("the and", per_batch=1))) as client:
        for most, on_loop in ((2048, True), (3, False)):
            monkeypatch.setattr("services.gateway.http.answering.MAX_LOGPROBS_ON_LOOP", most)
            wrote.clear()
            events = await client.events("/v1/completions", body)
            assert wrote
            assert (threading.main_thread().name in wrote) == on_loop
            told.append(sorted(str(event["choices"]) for event in events[:-1]))
    assert told[0] == told[1]
