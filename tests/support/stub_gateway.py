"""A real HTTP server on a thread of its own that answers GETs with what a test gives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

PREFILL, DECODE = "00000000000000aa", "00000000000000bb"


def a_view(**changes: Any) -> dict[str, Any]:
    """A body of GET /cluster: one worker each, one pair, some traffic."""
    blocks = {"total": 100, "free": 40, "reserved": 50, "quarantined": 10}
    worker: dict[str, Any] = {
        "running": 3, "waiting": 2, "pending_tokens": 12345, "blocks": blocks, "step_s": 0.0125,
        "paired": [], "state": "usable", "moves": False,
        "prediction": {"known": True, "believed": True, "ttft_error": None},
    }  # fmt: skip
    prompts = {"tokens": 0, "cached_tokens": 0, "dram_tokens": 0, "ssd_tokens": 0}
    return {
        "version": "1.2.3",
        "ready": True,
        "not_ready_reason": "",
        "uptime_s": 61.0,
        "model": {"id": "m", "max_model_len": 2048},
        "gateway": {"incarnation": "cc", "running": 5, "queued": 7, "refused": 11},
        "workers": [
            {**worker, "incarnation": PREFILL, "role": "prefill", "address": "10.0.0.1:1",
             "paired": [DECODE], "prompts": {**prompts}},
            {**worker, "incarnation": DECODE, "role": "decode", "address": "10.0.0.2:2",
             "state": "suspect", "prompts": {**prompts}},
        ],
        "window": {
            "seconds": 60, "requests": 42, "failed": 1, "output_tokens_per_s": 1234.5,
            "prompt_tokens_per_s": 99.6, "output_tokens_each_s": [0, 1, 2, 4],
            "ttft_s": {"p50": 0.1, "p90": 0.25, "p99": 1.5},
            "itl_s": None,
        },
        "transfers": [
            {"prefill": PREFILL, "decode": DECODE, "lane": "sysv", "count": 9, "bytes": 3 << 20,
             "gb_per_s": {"p50": 8.25, "p10": 0.3}, "exposed_s": {"p50": 0.001, "p99": 0.002}},
        ],
        "hot_prefixes": [
            {"hash": "00c0ffee00c0ffee", "tokens": 12032, "share": 0.375, "workers": 3},
        ],
        "planner": None,
        **changes,
    }  # fmt: skip


class StubGateway:
    """answers: path -> JSON body, or text for a page. key: without it every path is 401."""

    def __init__(self, answers: Mapping[str, Any], *, key: str = "") -> None:
        self._answers = answers
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stub gateway")
        self.url = ""

    def __enter__(self) -> StubGateway:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.Response:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            error = {"error": {"message": "an API key is needed", "code": "no_key"}}
            return web.Response(body=orjson.dumps(error), status=401)
        if request.path not in self._answers:
            return web.Response(text="not found", status=404)
        answer = self._answers[request.path]
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="text/html")
        return web.Response(body=orjson.dumps(answer), content_type="application/json")
