"""The operator's door of a worker: ``/metrics`` for Prometheus, ``/health`` (alive) and ``/ready``
(takes work).

Knows nothing of what is measured. Numbers are rendered when somebody asks, so an idle worker pays
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.listening import listen_at


class _ScrapeConnection(web.RequestHandler):
    """A connection; what is no HTTP is answered, not logged: anybody can send it, and as much as
    they like."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # Our own bugs are logged, and an answer that has begun cannot become another.
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        response = web.Response(status=status, text="this is not valid HTTP\n")
        response.force_close()
        return response


@asynccontextmanager
async def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, not_ready_reason: Callable[[], str]
) -> AsyncGenerator[None]:
    """Listen until the block ends; port 0 = do not listen at all.

    not_ready_reason: one sentence, or '' when the process takes work.
    Raises OSError: the port is in use.
    """
    if port == 0:
        yield
        return

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        reason = not_ready_reason()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/health", health), web.get("/ready", ready)]
    )
    # The runner for its handlers alone: its own sites would make connections that log strangers.
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    manager = runner.server
    assert manager is not None  # after its setup
    loop = asyncio.get_running_loop()

    def connection() -> _ScrapeConnection:
        return _ScrapeConnection(manager, loop=loop, access_log=cast("Any", None))

    try:
        server = await listen_at(connection, host, port)
        try:
            yield
        finally:
            server.close()
    finally:
        await runner.cleanup()
