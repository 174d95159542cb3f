"""The mesh in containers: right answers while it grows, shrinks and breaks, and what heals it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.compose.conftest import TWO
from tests.compose.project import Container, Project, Scale, run, wait_until
from tests.compose.questions import clients

NUM_CLIENTS = 12
"""Two of each kind at each gateway."""

NOTICED_WITHIN_S = 20.0
"""For a client whose gateway was killed; its own patience is many times that."""


def crash(container: Container) -> None:
    """Kill its process as the kernel would: `docker kill` counts as the user's wish, after which
    no restart policy acts."""
    state = container.inspect()
    run(
        *("docker", "run", "--rm", "--pid", "host", "--user", "0", "--network", "none"),
        *("--entrypoint", "python3", state["Image"]),
        *("-c", f"import os; os.kill({state['State']['Pid']}, 9)"),
    )


async def test_two_of_each_answer_through_shared_memory(mesh: Project) -> None:
    """Clients of all kinds get right answers from both gateways, every pair of workers carries
    some of them, and all KV goes through shared memory."""
    async with clients(mesh.doors, NUM_CLIENTS) as tally:
        async with asyncio.timeout(120):
            while len(tally.pairs) < 4:
                await tally.more(NUM_CLIENTS)
    tally.check()
    names = {name for pair in tally.pairs for name in pair}
    assert len(names) == 4
    assert {lane.partition("/")[0] for lane in tally.lanes} == {"sysv"}
    sizes = [one["size"] for one in mesh.segments()]
    print(f"shared memory of four workers: {len(sizes)} segments, {sum(sizes) >> 20} MiB")
    assert {one["uid"] for one in mesh.segments()} == {10001}


async def test_scaling_down_and_up_under_load(mesh: Project) -> None:
    """Workers leave and others come while clients ask, each role by itself: nothing is wrong,
    nothing fails, and those that leave have finished what they had (exit code 0). KV that nobody
    uses is copied below the pool."""
    ended: dict[str, list[int]] = {}
    async with clients(mesh.doors, NUM_CLIENTS) as tally:
        for prefill, decode in ((1, 1), (3, 2), (2, 2)):
            scale = Scale(gateway=2, prefill=prefill, decode=decode)
            began_at = time.time()
            await asyncio.to_thread(mesh.up, scale)
            await asyncio.to_thread(mesh.wait_healthy, scale)
            # At once: the engine remembers its last 256 events alone, looks at health included.
            for service, codes in mesh.exit_codes(began_at).items():
                ended.setdefault(service, []).extend(codes)
            await tally.more(NUM_CLIENTS)
    tally.check()
    print(f"{tally.num_right} answers right, {dict(tally.errors)}")
    assert set(ended.pop("secret")) == {0}  # looks each time whether there is one
    assert ended == {"prefill": [0, 0], "decode": [0]}
    stored = [one.metrics() for one in mesh.containers("prefill")]
    for tier in ("dram", "ssd"):
        assert any(one.get(f'tier_blocks_stored_total{{tier="{tier}"}}') for one in stored), tier


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker(role: str, mesh: Project) -> None:
    """With a spare worker its death is no client's error; `up` brings it back.

    It stands still for a dozen answers before, for a prefill worker has seldom a request in hand:
    what comes to it meanwhile is under way when it dies."""
    killed = mesh.containers(role)[-1]
    async with clients(mesh.doors, NUM_CLIENTS) as tally:
        await asyncio.to_thread(run, "docker", "kill", "--signal", "STOP", killed.id)
        try:
            await tally.more(NUM_CLIENTS)
        finally:
            await asyncio.to_thread(run, "docker", "kill", killed.id)
        await tally.more(4 * NUM_CLIENTS)
        assert killed.id not in {one.id for one in mesh.containers(role)}
        await asyncio.to_thread(mesh.up, TWO)
        await asyncio.to_thread(mesh.wait_healthy, TWO)
        await tally.more(NUM_CLIENTS)
    tally.check()
    print(f"{tally.num_right} answers right, {dict(tally.errors)}")
    assert tally.errors["worker_lost"] > 0, "nothing was under way on that worker"


async def test_a_crashed_worker_is_restarted(mesh: Project) -> None:
    """A worker that dies by itself comes back by its restart policy, and nobody notices."""
    (victim, *_) = mesh.containers("decode")
    async with clients(mesh.doors, NUM_CLIENTS) as tally:
        await asyncio.to_thread(crash, victim)
        await asyncio.to_thread(
            wait_until, lambda: victim.inspect()["RestartCount"] == 1, "the worker is restarted"
        )
        await asyncio.to_thread(mesh.wait_healthy, TWO)
        await tally.more(NUM_CLIENTS)
    tally.check()


async def test_a_killed_gateway(mesh: Project) -> None:
    """Clients of the other one notice nothing; its own fail at once, with nothing wrong before;
    it comes back and serves."""
    kept, killed = mesh.containers("gateway")
    lost_door = killed.door
    async with clients([kept.door], 6) as undisturbed:
        async with clients([lost_door], 6) as lost:
            killed_at = time.monotonic()
            await asyncio.to_thread(run, "docker", "kill", killed.id)
            await lost.until_failures(6)
            assert time.monotonic() - killed_at < NOTICED_WITHIN_S
        assert not lost.wrong
        host, _, port = lost_door.http.partition(":")
        with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
            await asyncio.wait_for(asyncio.open_connection(host, int(port)), NOTICED_WITHIN_S)
        await undisturbed.more(12)
        await asyncio.to_thread(mesh.up, TWO)
        await asyncio.to_thread(mesh.wait_healthy, TWO)
        async with clients([killed.door], 6) as returned:
            await returned.more(6)
        returned.check()
    undisturbed.check()


async def test_every_worker_joins_every_gateway(mesh: Project) -> None:
    """Workers that know one name serve every gateway behind it."""
    for worker in mesh.workers:
        assert worker.metrics()["sessions"] == 2, worker.name
    for gateway in mesh.containers("gateway"):
        metrics = gateway.metrics()
        for role in ("prefill", "decode"):
            assert metrics[f'workers{{role="{role}"}}'] == 2, gateway.name
