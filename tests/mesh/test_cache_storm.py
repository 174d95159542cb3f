"""Caches of a whole mesh while its processes die: blocks go down to memory and disk and come back,
prefixes are fetched from workers that have them, and source, sink and gateway are killed meanwhile.

Every answer is the right one, and at the end no tier of any worker has lost a block.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.engine.fake import FakeTiming
from shared.errors import Overloaded, WorkerLost
from shared.kv.tiers import SlotState
from shared.worker.core.life import Task
from tests.mesh.test_disk_tier import damage, full
from tests.mesh.test_tiers import is_quiet
from tests.support.grpc_client import Answer
from tests.support.loopback import LoopbackSettings
from tests.support.tiers import in_turn
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import RunningWorker, a_prompt, expected

NUM_TALKS, NUM_TURNS = 12, 4

TIMING = FakeTiming(prefill_token_s=1e-3)
"""What is cached somewhere is worth going for."""

FAST = 1e9

LINKS = [5e6, 1e6, 5e5]
"""Bytes/s: over the slowest the longest prompt's KV takes 0.25 s."""


def _sends(worker: RunningWorker) -> bool:
    return bool(worker.worker.prefix_source and worker.worker.prefix_source.tables())


def _fetches(worker: RunningWorker) -> bool:
    return any(it.task is Task.PREFIX for it in worker.worker.requests._answers.values())


def _copies(state: SlotState, tier: int) -> Callable[[RunningWorker], bool]:
    def copies(worker: RunningWorker) -> bool:
        tiers = worker.worker.tiers
        return tiers is not None and any(
            it.state is state for it in tiers.levels[tier].tier._entries.values()
        )

    return copies


MOMENTS: dict[str, Callable[[RunningWorker], bool]] = {
    "sends a prefix": _sends,
    "fetches a prefix": _fetches,
    "stores in memory": _copies(SlotState.STORING, 0),
    "loads from memory": _copies(SlotState.LOADING, 0),
    "writes to disk": _copies(SlotState.STORING, 1),
    "reads from disk": _copies(SlotState.LOADING, 1),
}
"""When somebody is struck: what a worker does then."""


class Storm:
    """One storm. struck: how often who died at which moment. came: tokens of prompts that were not
    computed, by whence they came."""

    def __init__(self, mesh: WholeMesh, chance: random.Random) -> None:
        self.mesh = mesh
        self.chance = chance
        self.struck = Counter[tuple[str, str]]()
        self.came = Counter[str]()
        self._roots = [a_prompt(chance.randrange(130, 420), seed=it) for it in range(4)]

    async def run(self) -> None:
        """Let clients talk while processes die, then wait until all is quiet."""
        async with asyncio.TaskGroup() as tasks:
            around = tasks.create_task(self._weather())
            strikes = tasks.create_task(self._strike())
            async with asyncio.TaskGroup() as talks:
                for number in range(NUM_TALKS):
                    talks.create_task(self._talk(number))
            around.cancel()
            strikes.cancel()
        self._set(FAST, 0.0, 0.0)
        async with asyncio.timeout(120.0):
            while not all(map(self._is_settled, self.mesh.workers)):
                await asyncio.sleep(0.1)
        for worker in self.mesh.workers:
            for level in worker.worker.tiers.levels if worker.worker.tiers else ():
                level.tier.check_integrity()

    def _is_settled(self, worker: RunningWorker) -> bool:
        tiers = worker.worker.tiers
        is_busy = worker.pool.num_held or worker.num_transfers or _sends(worker)
        return not is_busy and (tiers is None or is_quiet(tiers))

    # --- clients ---------------------------------------------------------------------------------

    async def _talk(self, number: int) -> None:
        """Some turns of a conversation; one that fails is asked again, as a client would."""
        chance = random.Random(f"{number}/{self.chance.random()}")
        talk = list(chance.choice(self._roots))
        await asyncio.sleep(chance.uniform(0, 4))
        for turn in range(NUM_TURNS):
            talk += a_prompt(chance.randrange(1, 60), seed=100 * number + turn)
            num_tokens = chance.randrange(1, 120)
            leave_after = chance.choice([None, None, None, None, 1, 9])
            right, answer = expected(talk, num_tokens), Answer()
            for _ in range(8):
                answer = await self._ask(talk, num_tokens, chance, leave_after)
                assert answer.token_ids == right[: len(answer.token_ids)]
                if answer.error is None:
                    break
                await asyncio.sleep(0.5)
            if leave_after is None and answer.error is None:
                assert answer.token_ids == right
            talk += right
            await asyncio.sleep(chance.choice([0.0, 0.3, 1.0]))

    async def _ask(
        self, talk: list[int], num_tokens: int, chance: random.Random, leave_after: int | None
    ) -> Answer:
        gateways = self.mesh.gateways
        number = chance.choice([idx for idx, it in enumerate(gateways) if it.lives])
        answer = await self.mesh.ask(talk, num_tokens, gateway=number, leave_after=leave_after)
        if answer.error is not None and gateways[number].lives:
            assert isinstance(answer.error, WorkerLost | Overloaded), answer.error
        for name in ("fetched", "dram", "ssd"):
            self.came[name] += answer.receipt.get(f"{name}_tokens", 0)
        return answer

    # --- what befalls them -----------------------------------------------------------------------

    async def _strike(self) -> None:
        """Kill a worker, or a gateway, at each of the moments, as they come; start another."""
        mesh, chance = self.mesh, self.chance
        to_come = [(who, moment) for moment in MOMENTS for who in ("worker", "gateway")]
        chance.shuffle(to_come)
        while to_come:
            now = [(it, busy) for it in to_come if (busy := self._busy(it[1]))]
            if not now:
                await asyncio.sleep(0.002)
                continue
            (who, moment), busy = now[0]
            to_come.remove((who, moment))
            if who == "gateway":
                await mesh.kill(chance.choice([it for it in mesh.gateways if it.lives]))
                await mesh.start_gateway()
            else:
                await mesh.kill(busy)
                await mesh.start_worker(busy.host.partition("-")[0])
            self.struck[who, moment] += 1
            self._set(FAST, 0.0, 0.0)  # canaries need a link of ordinary speed
            await mesh.until(self._is_paired)
            await asyncio.sleep(chance.uniform(0.1, 0.5))

    def _is_paired(self) -> bool:
        living = self.mesh.workers
        sinks = [it.incarnation for it in living if it.host.startswith("decode")]
        return all(
            sink in source.worker.pairs.speeds
            for source in living
            if source.host.startswith("prefill")
            for sink in sinks
        )

    def _busy(self, moment: str) -> RunningWorker | None:
        return next((it for it in self.mesh.workers if MOMENTS[moment](it)), None)

    async def _weather(self) -> None:
        """Links, copies and disks that are fast and slow, full and damaged, in turn."""
        chance = self.chance
        while True:
            link = chance.choice(LINKS) if self._is_paired() else FAST
            self._set(link, chance.choice([0.002, 0.02]), chance.choice([0.005, 0.05]))
            disks = [it.worker.tiers.levels[1] for it in self.mesh.workers if it.worker.tiers]
            if chance.random() < 0.3:
                damage(chance.choice(disks).arena, chance)
            no_room = [chance.choice(disks)] if chance.random() < 0.1 else []
            with full(*no_room):
                await asyncio.sleep(chance.uniform(0.05, 0.3))

    def _set(self, bytes_per_s: float, copy_s: float, disk_s: float) -> None:
        self.mesh.fabric.settings = LoopbackSettings(
            latency_s=0.0005, bytes_per_s=bytes_per_s, num_slices=3
        )
        for worker in self.mesh.workers:
            if worker.worker.tiers is not None:
                dram, disk = worker.worker.tiers.levels
                dram.arena._compute._copy_s = copy_s
                disk.arena._reader.delay_s = disk.arena._writer.delay_s = disk_s


@pytest.mark.parametrize("seed", in_turn(range(8), of=2))
def test_a_storm_over_fetches_and_tiers_gives_no_wrong_token(seed: int, tmp_path: Path) -> None:
    """Conversations over two gateways, two workers for prompts with little memory and disk below
    their pools, and two for answers, with a process killed in every stage of a fetch and a copy."""

    @virtual_time
    async def run() -> None:
        settings: dict[str, Any] = {
            "num_blocks": 72,  # of 16 tokens: the longest prompt, and no more
            "dram_cache": 1 << 18,
            "ssd_cache": tmp_path,
            "ssd_cache_size": 1 << 19,
            "cache_policy": ["lru", "lfu", "length-aware"][seed % 3],
        }
        async with whole_mesh(
            num_gateways=2,
            num_prefill=2,
            num_decode=2,
            num_blocks=256,
            prefill=settings,
            timing=TIMING,
            seed=seed,
        ) as mesh:
            storm = Storm(mesh, random.Random(seed))
            async with asyncio.timeout(600.0):
                await storm.run()
            assert sum(storm.struck.values()) >= 6  # of twelve
            assert storm.came["fetched"] > 0
            assert storm.came["dram"] + storm.came["ssd"] > 0

    run()
