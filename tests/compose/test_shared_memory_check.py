"""What the check at start finds if the workers share no IPC namespace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.project import Project, Scale, get, wait_until
from tests.compose.questions import clients

ONE = Scale(gateway=1, prefill=1, decode=1)


@pytest.fixture
def private_ipc(tmp_path: Path) -> Iterator[Project]:
    """A project whose workers each have an IPC namespace of their own."""
    override = tmp_path / "private.yaml"
    service = {"ipc": "private"}
    override.write_text(json.dumps({"services": {"prefill": service, "decode": service}}))
    project = Project("private", override)
    try:
        yield project
    finally:
        project.down()


async def test_a_lane_that_is_not_shared_memory_is_refused_with_a_reason(
    private_ipc: Project,
) -> None:
    """The mesh does not become ready and says why and what to do; with the check off it serves,
    over TCP, which is what nobody would have noticed."""
    await asyncio.to_thread(private_ipc.up, ONE)

    (prefill,) = private_ipc.containers("prefill")
    said = "--require-lane is shm,cuda_ipc"
    await asyncio.to_thread(wait_until, lambda: said in prefill.logs(), "prefill's log says it")
    for worker in private_ipc.workers:
        status, reason = await asyncio.to_thread(worker.get, 9090, "/ready")
        assert status == 503, worker.name
        assert "one IPC namespace" in reason, worker.name
        await asyncio.to_thread(wait_until, lambda one=worker: not one.is_healthy, "it is unwell")
    (gateway,) = private_ipc.containers("gateway")
    status, _ = await asyncio.to_thread(get, f"http://{gateway.door.http}/ready")
    assert status == 503
    assert not gateway.is_healthy

    await asyncio.to_thread(private_ipc.up, ONE, PDMESH_REQUIRE_LANE="")
    await asyncio.to_thread(private_ipc.wait_healthy, ONE)
    async with clients(private_ipc.doors, 3) as tally:
        pass
    tally.check()
    assert {lane.partition("/")[0] for lane in tally.lanes} == {"tcp"}
