"""``pdmesh role`` where the gateway goes away between its two questions."""

from __future__ import annotations

import pytest
from aiohttp import web

from services.cli.client import RunningGateway
from services.cli.flags import CannotRun
from services.cli.role import _move, _named
from shared.errors import InvalidRequest, NotFound


async def _cluster(request: web.Request) -> web.Response:
    return web.json_response({"workers": [{"incarnation": "ab", "address": "10.0.0.1:9000"}]})


async def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_gateway_that_hangs_up_is_told_in_words() -> None:
    """As of any command: whom it asked, and no trace of ours."""
    app = web.Application()
    app.router.add_get("/cluster", _cluster)
    app.router.add_post("/cluster/workers/ab/role", _hang_up)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(CannotRun, match=url):
            await _move("10.0.0.1:9000", "token", RunningGateway(url=url))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("worker", "count"), [("", 1), ("", 2), ("a", 2)])
def test_a_worker_is_named_by_more_than_chance(worker: str, count: int) -> None:
    """Nothing is the beginning of every name, and no name."""
    workers = [{"incarnation": f"a{idx}", "address": f"10.0.0.{idx}:9000"} for idx in range(count)]
    with pytest.raises(InvalidRequest, match="give more of it"):
        _named(worker, workers)


def test_a_worker_that_is_not_there_is_named_as_it_was_typed() -> None:
    """By an address, too: nobody is told that it should have been an incarnation."""
    workers = [{"incarnation": "a0", "address": "10.0.0.1:9000"}]
    with pytest.raises(NotFound, match=r"no worker '10.0.0.7:8001' is in the mesh: `pdmesh top`"):
        _named("10.0.0.7:8001", workers)
