"""A server that speaks OpenAI's API and is not pdmesh: its answers are planned to the token, so
that a client's counts can be compared with what was really sent.

As a program it paces many streams, for measuring what a load generator costs itself:

    python -m tests.support.openai_mock --port 8100 --interval 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

OURS = ("ignore_eos", "min_tokens")
"""Keys that OpenAI's own API refuses."""


@dataclass
class OpenAiMock:
    """What it understands and how it answers.

    usage: 'every', 'last' or '' = it never counts. chunk_tokens: tokens of a chunk. is_strict:
    refuse what OpenAI's API does not have. fate: of request number n: '' = served, 'refuse',
    'cut', 'break' (an error event amid the answer) or 'stall' (no end).
    """

    usage: str = "last"
    takes_ids: bool = False
    is_strict: bool = True
    has_completions: bool = True
    chunk_tokens: int = 1
    interval_s: float = 0.0
    fate: Callable[[int], str] = lambda number: ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, num_requests: int) -> None:
        """Wait until so many requests have come."""
        async with self._came:
            await self._came.wait_for(lambda: len(self.bodies) >= num_requests)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        body = orjson.loads(await request.read())
        trouble = self._trouble(body, "messages" in body)
        if trouble:
            return _error(400, trouble)
        self.bodies.append(body)
        fate = self.fate(len(self.bodies))
        async with self._came:
            self._came.notify_all()
        if fate == "refuse":
            return _error(503, "too busy")
        return await self._stream(request, body, fate)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fate: str
    ) -> web.StreamResponse:
        is_chat, options = "messages" in body, body.get("stream_options", {})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        every = self.usage == "every" and options.get("continuous_usage_stats")
        num_prompt, total = num_prompt_tokens(body), body["max_tokens"]
        done = 0
        while done < total:
            done = min(total, done + self.chunk_tokens)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            event: dict[str, Any] = {"choices": [choice]}
            if every:
                event["usage"] = _usage(num_prompt, done)
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if fate == "stall":
                await asyncio.Event().wait()
            if fate == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if fate == "break":
                await response.write(b'data: {"error": {"message": "the worker is gone"}}\n\n')
                return response
            if self.interval_s and done < total:
                await asyncio.sleep(self.interval_s)
        choice = {"index": 0, "finish_reason": "length"}
        choice |= {"delta": {}} if is_chat else {"text": ""}
        await response.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        if self.usage and options.get("include_usage"):
            event = {"choices": [], "usage": _usage(num_prompt, total)}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _trouble(self, body: dict[str, Any], is_chat: bool) -> str:
        if not is_chat and not self.has_completions:
            return "no completions here"
        if isinstance(body.get("prompt"), list) and not self.takes_ids:
            return "prompt must be a string"
        if self.is_strict and any(key in body for key in OURS):
            return "unknown parameter"
        if self.is_strict and not self.usage and "stream_options" in body:
            return "unknown parameter: stream_options"
        return ""


def num_prompt_tokens(body: dict[str, Any]) -> int:
    """Return how many prompt tokens the mock counts: ids, or two for each word."""
    prompt = body.get("prompt", body.get("messages", [{}])[0].get("content", ""))
    return len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())


def _usage(num_prompt: int, done: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": done}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


@contextlib.asynccontextmanager
async def openai_mock(mock: OpenAiMock, port: int = 0) -> AsyncGenerator[OpenAiMock]:
    """Serve on loopback for the length of the block; ``url`` is set then."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_get("/v1/models", mock.models)
    app.router.add_post("/v1/completions", mock.answer)
    app.router.add_post("/v1/chat/completions", mock.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        mock.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield mock
    finally:
        await runner.cleanup()


async def _serve(port: int, interval_s: float) -> None:
    mock = OpenAiMock("every", takes_ids=True, is_strict=False, interval_s=interval_s)
    async with openai_mock(mock, port):
        print(f"ready: {mock.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--interval", type=float, default=0.05)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(_serve(given.port, given.interval))
