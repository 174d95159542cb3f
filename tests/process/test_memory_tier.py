"""Real processes and a real model: a prompt that others drove out of the KV pool comes back from
host memory or from disk, and its answer is the same."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_mesh import ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.process

NUM_BLOCKS = 64
NUM_TOKENS = 800  # 50 blocks
NUM_COMPUTED = 16  # a prompt's last token is always computed, and so its block
CACHED = NUM_TOKENS - NUM_COMPUTED
STARTS = (5, 6, 7)
SLOW = {"kernels": "torch"}
"""To compute takes so long that to load is worth while on a busy machine, too."""


async def ask_twice(
    mesh: ProcessMesh, gateway: ServiceProcess, prefill: ServiceProcess, tier: str
) -> None:
    """Ask for prompts that drive each other out, twice."""
    texts: dict[int, str] = {}
    for turn in range(2):
        for start in STARTS:
            answer = await mesh.ask(gateway, a_prompt(NUM_TOKENS, start=start), 8)
            answer.require_whole(8)
            assert texts.setdefault(start, answer.text) == answer.text
            assert answer.receipt["cached_tokens"] == turn * CACHED
            assert answer.receipt[f"{tier}_tokens"] == turn * CACHED
            if not turn:
                await stored(mesh, prefill, tier, len(texts) * NUM_TOKENS // 16)


async def stored(mesh: ProcessMesh, prefill: ServiceProcess, tier: str, num_blocks: int) -> None:
    """Wait until so many blocks have been copied down."""

    async def are_stored() -> bool:
        return (await mesh.gauges(prefill))[f"tier_blocks_stored_total:{tier}"] >= num_blocks

    await mesh.until(are_stored)


def settings_of(tier: str, folder: Path) -> dict[str, Any]:
    """Return a worker's settings with room for every prompt in one tier."""
    return {
        "dram": {"dram_cache": 1 << 30},
        "ssd": {"ssd_cache": folder, "ssd_cache_size": 1 << 30},
    }[tier]


@pytest.mark.ucx
async def test_evicted_prompts_come_back_from_below_the_pool(tmp_path: Path) -> None:
    """Each prompt but its last block is read back, and the receipt counts it by its tier. Answers
    are the same, and the metrics tell what was moved."""
    for tier in ("dram", "ssd"):
        async with process_mesh(engine="torch") as mesh:
            with mesh.explained():
                gateway = await mesh.start_gateway()
                settings = settings_of(tier, tmp_path)
                prefill = await mesh.add("prefill", num_blocks=NUM_BLOCKS, **settings, **SLOW)
                await mesh.add("decode", cache_prefixes=False, **SLOW)
                await mesh.paired(gateway, 1)
                await ask_twice(mesh, gateway, prefill, tier)
                gauges = await mesh.gauges(prefill)
        assert gauges[f"tier_tokens_loaded_total:{tier}"] == len(STARTS) * CACHED


@pytest.mark.ucx
async def test_kv_on_disk_outlives_its_worker_and_a_disk_that_fails(tmp_path: Path) -> None:
    """After SIGKILL the next worker answers from what the last one wrote. When the kernel refuses
    writes, one line says so, answers go on, and what is there is read."""
    settings = settings_of("ssd", tmp_path)
    async with process_mesh(engine="torch") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill = await mesh.add("prefill", num_blocks=NUM_BLOCKS, **settings, **SLOW)
            await mesh.add("decode", cache_prefixes=False, **SLOW)
            await mesh.paired(gateway, 1)
            prompt = a_prompt(NUM_TOKENS, start=5)
            first = await mesh.ask(gateway, prompt, 8)
            await stored(mesh, prefill, "ssd", NUM_TOKENS // 16)
            await prefill.kill()

            again = await mesh.add("prefill", num_blocks=NUM_BLOCKS, **settings, **SLOW)
            await mesh.paired(gateway, 1)
            answer = await mesh.ask(gateway, prompt, 8)
            answer.require_whole(8)
            assert answer.text == first.text
            assert answer.receipt["ssd_tokens"] == CACHED
            assert 0 < answer.receipt["load_s"] <= answer.receipt["prefill_queue_s"]

            resource.prlimit(again.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            for start in STARTS[1:]:
                answer = await mesh.ask(gateway, a_prompt(NUM_TOKENS, start=start), 8)
                answer.require_whole(8)
            answer = await mesh.ask(gateway, prompt, 8)
            assert answer.text == first.text
            assert answer.receipt["ssd_tokens"] == CACHED
            lost = (await mesh.gauges(again))["tier_blocks_lost_total:ssd"]
            assert lost > 0
