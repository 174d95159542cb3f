"""Workers under a gateway that does all that it may, and some that it may not: orders without the
other leg, twice, with wrong hints and short deadlines, cancelled at any time; while pairs break,
KV stands still, copies fail, disks are full and prefill workers die."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from pathlib import Path
from typing import Any

import pytest

from shared import wire
from shared.engine.fake import FakeTiming
from shared.errors import MeshError, TransferFailed, WorkerLost
from shared.request import FinishReason
from tests.support.fake_gateway import FakeRequest
from tests.support.loopback import LoopbackSettings
from tests.support.tiers import in_turn
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import RunningWorker, WorkerMesh, a_prompt, expected, worker_mesh

NUM_REQUESTS = 60

FAST = 1e9


class Storm:
    """One storm over one mesh."""

    def __init__(self, mesh: WorkerMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self._chance = chance
        self._roots = [a_prompt(chance.randrange(130, 700), seed=number) for number in range(3)]
        self._rages = True
        self._asked: list[tuple[FakeRequest, list[int]]] = []

    async def run(self) -> None:
        """All of it, and what every worker does when it is over."""
        for running in self.mesh.workers:
            self._spoil(running)
        async with asyncio.TaskGroup() as tasks:
            weather = tasks.create_task(self._weather())
            async with asyncio.TaskGroup() as clients:
                for _ in range(NUM_REQUESTS):
                    clients.create_task(self._client())
            weather.cancel()
        self._clear_up()
        async with asyncio.timeout(120.0):
            while not self.mesh.is_idle:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        self.mesh.assert_pools_full()
        for running in self.mesh.workers:
            worker = running.worker
            for shell in (worker.pusher, worker.receiver):
                assert shell is None or not shell._effects.tasks._tasks
            assert not worker.requests._watchers._tasks
        for request, prompt in self._asked:
            right = expected(prompt, 40)
            assert all(right[index] == token for index, token in request.tokens.items())
        for p in range(2):
            for d in range(2):
                await self.mesh.gateway.paired(
                    self.mesh.prefills[p].incarnation, self.mesh.decodes[d].incarnation
                )
                prompt = a_prompt(90, seed=1000 + 2 * p + d)
                request = self.mesh.start(prompt, 5, p=p, d=d, wait_s=30.0)
                assert await request.finished() == expected(prompt, 5)

    # --- what is ordered -------------------------------------------------------------------------

    async def _client(self) -> None:
        chance = self._chance
        await asyncio.sleep(chance.uniform(0, 12))
        prompt = chance.choice(self._roots)[: chance.randrange(1, 700)]
        prompt = prompt + a_prompt(chance.randrange(1, 200), seed=chance.randrange(6))
        more: dict[str, Any] = {
            "legs": chance.choice(["pd"] * 6 + ["p", "d"]),
            "wait_s": chance.choice([0.0, 2.0, 20.0]),
            "deadline_s": chance.choice([0.0] * 4 + [0.05, 1.0]),
            "by": chance.choice([self.mesh.gateway, self.mesh.other_gateway]),
            "request_id": chance.randbytes(16),
        }
        if chance.random() < 0.4:
            source = chance.choice(self.mesh.prefills + self.mesh.decodes)
            more["prefix"] = wire.PrefixSource(
                incarnation=source.incarnation,
                num_tokens=chance.choice([128, 256, 512, 4096]),
                wait_s=chance.choice([0.01, 0.5, 5.0]),
            )
        num_tokens, p, d = chance.randrange(1, 40), chance.randrange(2), chance.randrange(2)
        for _ in range(chance.choice([1, 1, 1, 1, 2])):  # the same attempt again
            request = self.mesh.start(prompt, num_tokens, p=p, d=d, **more)
            self._asked.append((request, prompt))
            if chance.random() < 0.4:
                await asyncio.sleep(chance.choice([0, 0, 0.001, 0.02, 0.3, 2.0]))
                chance.choice([request.cancel, request.cancel_prefill, request.cancel_decode])()
            await asyncio.sleep(chance.choice([0.0, 0.1]))
        with contextlib.suppress(TimeoutError, MeshError):
            async with asyncio.timeout(chance.choice([1.0, 10.0])):
                await request.until(lambda it: it.finish is not FinishReason.NONE)
        request.cancel()

    # --- what befalls them -----------------------------------------------------------------------

    def _spoil(self, running: RunningWorker) -> None:
        """Some copies into its pool fail, and some writes to its disk."""
        chance, engine = self._chance, running.engine
        scatter = engine.scatter

        def may_fail(*args: Any) -> None:
            if self._rages and len(args[0]) > 1 and chance.random() < 0.01:  # of a frame
                raise TransferFailed("for a test")
            scatter(*args)

        engine.scatter = may_fail  # type: ignore[method-assign]
        for level in running.worker.tiers.levels if running.worker.tiers else ():
            if hasattr(level.arena, "_write"):
                write = level.arena._write

                def is_full(*args: Any, write: Any = write) -> None:
                    if chance.random() < 0.1:
                        raise OSError(errno.ENOSPC, "no space")
                    write(*args)

                level.arena._write = is_full

    async def _weather(self) -> None:
        chance, mesh = self._chance, self.mesh
        while True:
            await asyncio.sleep(chance.uniform(0.05, 1.0))
            worker = chance.choice(mesh.workers)
            match chance.choice(["break", "freeze", "link", "link", "session", "kill"]):
                case "break":
                    for link in list(worker.worker.pairs._links.values()):
                        if chance.random() < 0.5:
                            link.lose(WorkerLost("for a test"))
                case "freeze":
                    mesh.fabric.freeze(worker.transport_address)
                    await asyncio.sleep(chance.choice([0.1, 1.0, 8.0, 20.0]))
                    mesh.fabric.thaw(worker.transport_address)
                case "link":
                    mesh.fabric.settings = LoopbackSettings(
                        latency_s=chance.choice([0.0005, 0.01]),
                        bytes_per_s=chance.choice([FAST, 1e4, 2e5]),
                        num_slices=chance.choice([1, 3]),
                        has_windows=mesh.fabric.settings.has_windows,
                        settles_on_close=chance.choice([True, True, False]),
                    )
                case "session":
                    session = mesh.other_gateway.sessions[worker.incarnation]
                    if session.is_open:
                        session.reset()
                case _:
                    mesh.fabric.settings = LoopbackSettings(
                        latency_s=0.0005,
                        bytes_per_s=FAST,
                        has_windows=mesh.fabric.settings.has_windows,
                    )
                    p = chance.randrange(2)
                    await mesh.kill(mesh.prefills[p])
                    await mesh.restart(p)
                    self._spoil(mesh.prefills[p])

    def _clear_up(self) -> None:
        self._rages = False
        for worker in self.mesh.workers:
            self.mesh.fabric.thaw(worker.transport_address)
        self.mesh.fabric.settings = LoopbackSettings(
            latency_s=0.0005,
            bytes_per_s=FAST,
            has_windows=self.mesh.fabric.settings.has_windows,
        )


@pytest.mark.parametrize("seed", in_turn(range(8), of=4))
@virtual_time
async def test_whatever_is_ordered_and_befalls_nothing_is_left(seed: int, tmp_path: Path) -> None:
    """Every token is right, and when all is over no worker holds or remembers anything."""
    chance = random.Random(seed)
    settings: dict[str, Any] = {
        "staging_mib": chance.choice([16, 32, 64]),
        "group_kib": chance.choice([1, 4, 1024]),
        "share_prefixes": chance.random() < 0.8,
        "transfer_mode": chance.choice(["auto", "layerwise", "serialized"]),
        "token_budget": chance.choice([0, 100]),
    }
    tiers = {"dram_cache": 1 << 17, "ssd_cache": tmp_path, "ssd_cache_size": 1 << 18}
    async with worker_mesh(
        num_prefill=2,
        num_decode=2,
        prefill_blocks=chance.choice([70, 200]),
        decode_blocks=chance.choice([70, 200]),
        decode_block_size=chance.choice([8, 16, 32]),
        prefill=settings | (tiers if chance.random() < 0.7 else {}),
        decode={"staging_mib": settings["staging_mib"]},
        timing=FakeTiming(base_s=chance.choice([0.002, 0.02]), prefill_token_s=1e-4),
        seed=seed,
    ) as mesh:
        await Storm(mesh, chance).run()
