"""Real processes and a real model: a prompt that others drove out of the KV pool comes back from
host memory, and its answer is the same."""

from __future__ import annotations

import statistics

import pytest

from tests.support.process_mesh import ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.process

NUM_TOKENS = 1600  # 100 of 128 blocks
NUM_COMPUTED = 16  # a prompt's last token is always computed, and so its block


STORED, LOADED = "tier_blocks_stored_total:dram", "tier_tokens_loaded_total:dram"


async def first_tokens(
    mesh: ProcessMesh, gateway: ServiceProcess, prefill: ServiceProcess, cached: int
) -> list[float]:
    """Ask for prompts that drive each other out, twice; return the second times to token 1."""
    texts: dict[int, str] = {}
    times: list[float] = []
    for turn in range(2):
        for start in (5, 6, 7, 8, 9):
            answer = await mesh.ask(gateway, a_prompt(NUM_TOKENS, start=start), 8)
            answer.require_whole(8)
            assert texts.setdefault(start, answer.text) == answer.text
            assert answer.receipt["cached_tokens"] == turn * cached
            if cached and not turn:
                num_stored = len(texts) * NUM_TOKENS // 16

                async def is_stored(num: int = num_stored) -> bool:
                    return (await mesh.gauges(prefill))[STORED] >= num

                await mesh.until(is_stored)
            if turn:
                times.append(answer.receipt["ttft_s"])
    return times


@pytest.mark.ucx
async def test_evicted_prompts_come_back_from_memory() -> None:
    """Each prompt but its last block is read back, and ``cached_tokens`` counts it; without the
    memory all is computed again. Answers are the same, and the metrics tell what was moved."""
    medians: dict[int, float] = {}
    for size in (0, 1 << 30):
        async with process_mesh(engine="torch") as mesh:
            with mesh.explained():
                gateway = await mesh.start_gateway()
                prefill = await mesh.add("prefill", num_blocks=128, dram_cache=size)
                await mesh.add("decode", cache_prefixes=False)
                await mesh.paired(gateway, 1)
                cached = NUM_TOKENS - NUM_COMPUTED if size else 0
                medians[size] = statistics.median(
                    await first_tokens(mesh, gateway, prefill, cached)
                )
                gauges = await mesh.gauges(prefill)
        assert gauges.get(LOADED, 0) == 5 * cached
    print(f"median time to token 1: computed {medians[0]:.4f} s, read {medians[1 << 30]:.4f} s")
