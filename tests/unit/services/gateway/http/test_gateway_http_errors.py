"""The HTTP door when things go wrong: one error shape, bounded bodies, fuzzed bodies."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tracemalloc
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.http.connection import HEADER_TIMEOUT_S, LINGER_S
from services.gateway.http.server import BODY_TIMEOUT_S
from services.gateway.limits import MAX_BODY_BYTES
from services.gateway.mesh import GenerationRequest, Tokens
from shared.errors import (
    DeadlinePassed,
    InvariantViolated,
    NoCapacity,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from tests.support.answer_tokens import answer_tokens
from tests.support.http_client import HI, gateway, memory_link, post_bytes, raw_connection
from tests.support.scripted_mesh import (
    ScriptedMesh,
    failing_after,
    http_gateway,
    saying,
)
from tests.support.virtual_loop import virtual_time


def packed(data: bytes) -> bytes:
    """The same bytes whenever it is asked: they are in the names of tests."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full", retry_after_s=1.2), 503),
        (NoCapacity("too long for any worker"), 400),
        (ShuttingDown("going", retry_after_s=2), 503),
        (DeadlinePassed("late"), 504),
        (WorkerLost("gone"), 503),
        (ValueError("canary"), 500),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_an_error_before_the_first_token_is_a_status(
    error: Exception, status: int, fields: dict[str, Any]
) -> None:
    """Streaming or not, one answer or several: a typed status, and not a word of our own bugs."""
    mesh = ScriptedMesh()
    mesh.refusal = error
    async with gateway(mesh) as client:
        found, headers, body = await client.ask(
            "POST", "/v1/completions", json={"prompt": "a", **fields}
        )
    assert found == status
    hint = {"retry_after_s"} if getattr(error, "retry_after_s", 0) else set()
    assert set(body["error"]) == {"message", "type", "param", "code", *hint}
    assert "canary" not in json.dumps(body)
    if isinstance(error, Overloaded):
        assert headers["Retry-After"] == "2"
    # Else clients of OpenAI and Anthropic send it again: what is late is computed three times.
    is_final = isinstance(error, DeadlinePassed | ValueError)
    assert (headers.get("x-should-retry") == "false") == is_final
    # A pooled connection would lead to this gateway again, for as long as it drains.
    assert (headers.get("Connection") == "close") == isinstance(error, ShuttingDown)
    assert mesh.num_running == 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("error", [WorkerLost("gone"), ValueError("canary")])
async def test_an_error_after_the_first_token_ends_the_stream_with_it(
    n: int, error: Exception
) -> None:
    """The error is the last event; no [DONE] and no finish reason pretend that the answer is
    whole."""
    mesh = ScriptedMesh(failing_after("the", error))
    async with gateway(mesh) as client:
        events = await client.events("/v1/completions", {"prompt": "a", "n": n})
    assert events[0]["choices"][0]["text"] == "the"
    code = "worker_lost" if isinstance(error, WorkerLost) else "internal"
    assert events[-1]["error"]["code"] == code
    assert "canary" not in json.dumps(events)
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert mesh.num_running == 0


async def test_an_error_after_the_first_token_of_a_whole_answer_is_a_status() -> None:
    """Half an answer is never a 200."""
    async with gateway(ScriptedMesh(failing_after("the", WorkerLost("gone")))) as client:
        status, _, body = await client.ask("POST", "/v1/completions", json={"prompt": "a"})
    assert (status, body["error"]["code"]) == (503, "worker_lost")


async def test_a_generation_that_just_ends_is_our_bug() -> None:
    """Silence is never taken for a finished answer."""

    async def silent(_: object) -> AsyncGenerator[Tokens]:
        yield answer_tokens((100,))

    async with gateway(ScriptedMesh(silent)) as client:
        status, _, body = await client.ask("POST", "/v1/completions", json={"prompt": "a"})
    assert (status, body["error"]["code"]) == (500, InvariantViolated.type)


async def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    """404 and 405 are typed errors too."""
    async with gateway(ScriptedMesh()) as client:
        for path, words in (
            ("/v1/embeddings", "no route GET /v1/embeddings: this mesh answers text with text"),
            ("/rerank", "answers text with text (POST /v1/chat/completions)"),
            ("/v1/images/edits", "no route GET /v1/images/edits: this mesh answers text with text"),
            ("/v1/responses/x/cancel", "GET /v1/responses/x/cancel: POST /v1/responses and"),
            ("/v1/messages/batches", "GET /v1/messages/batches: POST /v1/responses and"),
            ("/v1/embeddingsx", "no route GET /v1/embeddingsx: OpenAI's API is POST /v1/chat"),
            ("/v1", "no route GET /v1: OpenAI's API is"),
            ("/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
            ("/x%3Cscript%3E", "no such route: OpenAI's API is"),
        ):
            status, _, body = await client.ask("GET", path)
            assert (status, body["error"]["code"]) == (404, "route_not_found")
            assert words in body["error"]["message"]
            assert body.get("type") == ("error" if path.startswith("/v1/messages/") else None)
        anthropic = {"anthropic-version": "2023-06-01"}
        _, _, body = await client.ask("GET", "/v1/files", headers=anthropic)
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        status, headers, body = await client.ask("GET", "/v1/completions")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert headers["Allow"] == "POST"


async def test_bodies_are_bounded() -> None:
    """Too large, announced or not, is 413."""
    async with gateway(ScriptedMesh()) as client:
        big = io.BytesIO(b" " * (MAX_BODY_BYTES + 1))
        status, _, body = await client.ask("POST", "/v1/completions", data=big)
        assert (status, body["error"]["code"]) == (413, "body_too_large")

        async def chunks() -> AsyncGenerator[bytes]:
            for _ in range(5):
                yield b" " * (1 << 20)

        status, _, body = await client.ask("POST", "/v1/completions", data=chunks())
        assert (status, body["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_all_bodies_together_are_bounded(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is in hand the next large one is told to come again, and a small one is served."""
    monkeypatch.setattr("services.gateway.limits.MAX_BODIES_BYTES", 1 << 20)
    is_asked, may_end = asyncio.Event(), asyncio.Event()

    async def script(request: GenerationRequest) -> AsyncGenerator[Tokens]:
        if not is_asked.is_set():
            is_asked.set()
            await may_end.wait()
        async for tokens in saying("the end")(request):
            yield tokens

    body = ASKED.ljust(700_000)
    large = {
        "data": packed(body) if encoding == "gzip" else body,
        "headers": {"Content-Encoding": encoding},
    }
    async with gateway(ScriptedMesh(script)) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.ask("POST", "/v1/completions", **large))
        await is_asked.wait()
        status, headers, answer = await client.ask("POST", "/v1/completions", **large)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert answer["error"]["message"] == "too many large requests at once"
        assert (await client.ask("POST", "/v1/completions", data=ASKED))[0] == 200
        may_end.set()
        assert (await first)[0] == 200
        assert (await client.ask("POST", "/v1/completions", **large))[0] == 200


ASKED = json.dumps({"model": "tiny", "prompt": "a b", "max_tokens": 2}).encode()
HALVES = packed(ASKED[:20]) + packed(ASKED[20:])


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", packed(ASKED)),
        ("GZip", HALVES),
        ("deflate", zlib.compress(ASKED)),
        ("identity", ASKED),
    ],
)
async def test_compressed_bodies_are_read(encoding: str, data: bytes) -> None:
    """As clients and proxies send them: the answer is that to the plain one."""
    async with gateway(ScriptedMesh()) as client:
        path, headers = "/v1/completions", {"Content-Encoding": encoding}
        _, _, want = await client.ask("POST", path, data=ASKED)
        status, _, body = await client.ask("POST", path, data=data, headers=headers)
        assert (status, body["choices"]) == (200, want["choices"])


async def test_a_body_may_begin_with_the_mark_of_windows_editors() -> None:
    """As with servers on Python's json, and as a trace and a configuration may."""
    async with gateway(ScriptedMesh()) as client:
        for data in (b"\xef\xbb\xbf" + ASKED, ASKED):
            status, _, _ = await client.ask("POST", "/v1/completions", data=data)
            assert status == 200


@pytest.mark.parametrize(
    ("encoding", "data", "status", "code", "word"),
    [
        ("br", b"x", 400, "invalid_request", "gzip, deflate, or none"),
        ("gzip, gzip", packed(packed(ASKED)), 400, "invalid_request", "not served"),
        ("gzip", b"\x1f\x8b", 400, "invalid_request", "ends too soon"),
        ("gzip", packed(ASKED)[:-9], 400, "invalid_request", "ends too soon"),
        ("gzip", ASKED, 400, "invalid_request", "the body is not gzip"),
        ("deflate", packed(ASKED), 400, "invalid_request", "the body is not deflate"),
        ("gzip", packed(bytes(1 << 26)), 413, "body_too_large", "larger than"),
        ("gzip", packed(bytes(MAX_BODY_BYTES)) * 2, 413, "body_too_large", "larger than"),
        ("gzip", packed(b"") * 257, 400, "invalid_request", "more than 256"),
    ],
)
async def test_what_cannot_be_unpacked_is_refused(
    encoding: str, data: bytes, status: int, code: str, word: str
) -> None:
    """Unknown, damaged, or larger than a body may be: no more than that is unpacked."""
    async with gateway(ScriptedMesh()) as client:
        headers = {"Content-Encoding": encoding}
        tracemalloc.start()
        got, _, body = await client.ask("POST", "/v1/completions", data=data, headers=headers)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (got, body["error"]["code"]) == (status, code)
        assert word in body["error"]["message"]
        assert most < 8 * MAX_BODY_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"canary\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\ncanary\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"canary" * 3000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"canary: y\r\n" * 200 + b"\r\n",
    ],
)
async def test_malformed_http_is_answered_in_our_shape_without_an_echo(data: bytes) -> None:
    """The parser's own complaints repeat nothing that was sent, and close the connection."""
    async with http_gateway(ScriptedMesh()) as url, raw_connection(url) as (reader, writer):
        writer.write(data)
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4") or head.startswith(b"HTTP/1.0 4")
    assert json.loads(body)["error"]["code"] == "bad_http"
    assert b"canary" not in answer


@pytest.mark.parametrize(
    ("begun", "limit_s", "code"),
    [
        (b"GET /health HTTP/1.1\r\nHost:", HEADER_TIMEOUT_S, ""),
        (
            post_bytes("/v1/completions", {"prompt": "a"})[:-3],
            BODY_TIMEOUT_S + LINGER_S,
            "body_timeout",
        ),
    ],
)
@virtual_time
async def test_a_client_that_never_finishes_its_request_is_dropped(
    begun: bytes, limit_s: float, code: str
) -> None:
    """Neither slow headers nor a slow body hold a connection for ever."""
    async with memory_link(ScriptedMesh()) as link:
        link.say(begun)
        head, _, body = (await link.reader.read()).partition(b"\r\n\r\n")
        assert asyncio.get_running_loop().time() == pytest.approx(limit_s)
    if code:
        assert head.startswith(b"HTTP/1.1 504")
        assert json.loads(body)["error"]["code"] == code
    else:
        assert head == b""


async def test_logs_hold_no_text_and_no_key(tmp_path: Path) -> None:
    """Prompts, answers and keys stay out of every record, also when something breaks."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "canary-key"))
    mesh = ScriptedMesh(saying("canary answer"))
    headers = {"Authorization": "Bearer canary-key", "X-Request-Id": "my-label"}
    fields = {"prompt": "canary prompt", "stop": ["canary stop"], "cache_salt": "canary-salt"}
    with structlog.testing.capture_logs() as records:
        async with gateway(mesh, KeyRing(path)) as client:
            for wrong in ({}, {"temperature": "canary"}, {"model": "canary"}):
                body = {**fields, **wrong}
                await client.ask("POST", "/v1/completions", json=body, headers=headers)
            mesh.script = failing_after("canary", ValueError("broken"))
            await client.ask("POST", "/v1/completions", json=fields, headers=headers)
    calls = [record for record in records if record["event"] == "request"]
    assert [record["outcome"] for record in calls] == [
        "ok",
        "invalid_request",
        "not_found",
        "internal",
    ]
    assert {(record["key"], record["label"]) for record in calls} == {("alice", "my-label")}
    assert "canary" not in repr(records)


POST_ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "model", "messages", "prompt", "max_tokens", "n", "temperature", "stop", "stream",
            "echo", "logprobs", "top_logprobs", "logit_bias", "seed", "stop_token_ids",
            "stream_options", "chat_template_kwargs", "tokens", "min_tokens", "add_special_tokens",
        ]
    ),
    JSON,
)  # fmt: skip
VALID = st.sampled_from(
    [
        {},
        {"messages": HI},
        {"prompt": "a"},
        {"prompt": [1, 2]},
        {"tokens": [9]},
        {"prompt": ["", "b"]},
    ]
)


@settings(max_examples=25)
@given(data=st.data())
def test_random_bodies_are_never_a_5xx(data: st.DataObject) -> None:
    """Whatever JSON comes, on every POST route, is answered or refused; it never trips us up."""
    bodies = data.draw(
        st.lists(st.builds(lambda valid, fields: {**valid, **fields}, VALID, FIELDS), max_size=5)
    )

    async def send() -> list[int]:
        async with gateway(ScriptedMesh()) as client:
            return [
                (await client.session.post(client.url + path, json=body)).status
                for body in bodies
                for path in POST_ROUTES
            ]

    assert all(200 <= status < 500 for status in asyncio.run(send()))


async def test_a_role_that_cannot_be_changed_is_a_typed_error() -> None:
    """An unknown worker is not found; an unknown role, or none, never comes to the mesh."""
    async with gateway(ScriptedMesh()) as client:
        path = "/cluster/workers/1f/role"
        status, _, body = await client.ask("POST", path, json={"role": "token"})
        assert (status, body["error"]["code"]) == (404, "no_worker")
        for wrong in ({"role": "both"}, {}, {"role": "token", "more": 1}):
            status, _, body = await client.ask("POST", path, json=wrong)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")
