"""``pdmesh role``: change what a worker is when nothing is asked of it, without a restart."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal
from urllib.parse import quote

from services.cli.client import LOCAL_GATEWAY, RunningGateway
from services.cli.sources import PLAIN
from shared.errors import InvalidRequest, NotFound


def role(
    worker: Annotated[str, PLAIN],
    home: Annotated[Literal["prompt", "token"], PLAIN],
    /,
    *,
    gateway: RunningGateway = LOCAL_GATEWAY,
) -> None:
    """Change a worker's home role: prompt (prefill) or token (decode).

    Nothing is restarted, and what the worker has in hand goes on. It must be one that may be
    either (pdmesh up --workers, or --movable), and not the last one of its role.

    Parameters
    ----------
    worker
        Its address, as `pdmesh top` shows it, or its incarnation, as /cluster has it, or the
        beginning of that.
    home
        What it is to be when nothing is asked of it.
    """
    moved = asyncio.run(_move(worker, home, gateway))
    print(f"{moved['incarnation']} ({moved['address']}): home {moved['home']}, now {moved['pool']}")


async def _move(worker: str, home: str, gateway: RunningGateway) -> dict[str, Any]:
    async with gateway.access.session() as session:
        view = await gateway.call(session, "/cluster")
        incarnation = _named(worker, view["workers"])
        path = f"/cluster/workers/{quote(incarnation, safe='')}/role"
        return await gateway.call(session, path, sent={"role": home})


def _named(worker: str, workers: list[dict[str, Any]]) -> str:
    """Return the incarnation of the one worker that is meant. Raises NotFound, InvalidRequest."""
    meant = [
        it["incarnation"]
        for it in workers
        if it["address"] == worker or it["incarnation"].startswith(worker.lower())
    ]
    if len(meant) > 1 or not worker:
        raise InvalidRequest(f"{worker!r} may be any of {len(meant)} workers: give more of it")
    if not meant:
        raise NotFound(f"no worker {worker!r} is in the mesh: `pdmesh top` lists those that are")
    return meant[0]
