"""What the mesh does around an engine, over vLLM: its KV comes back from memory, from disk and from
a peer, and its workers change their roles; no answer shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess
from tests.vllm.conftest import EAGER

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.process, pytest.mark.ucx),
    pytest.mark.timeout(600),
]

VLLM = {"vllm_args": EAGER, "num_blocks": 160, "dtype": "float32"}
FEW = VLLM | {"num_blocks": 80}
NUM_PROMPT = 1600  # 50 of 80 blocks
CACHED = NUM_PROMPT - 32  # the last token is always computed, and so its block
NUM_TOKENS = 8
STARTS = (5, 6, 7)


async def ask_each(mesh: ProcessMesh, gateway: ServiceProcess) -> list[Answer]:
    """Prompts of which the pool holds one, one after the other."""
    found: list[Answer] = []
    for start in STARTS:
        answer = await mesh.ask(gateway, a_prompt(NUM_PROMPT, start=start), NUM_TOKENS)
        answer.require_whole(NUM_TOKENS)
        found.append(answer)
    return found


async def stored(mesh: ProcessMesh, worker: ServiceProcess, tier: str) -> None:
    """Wait until every prompt has been copied down."""
    wanted = len(STARTS) * NUM_PROMPT // 32

    async def are_stored() -> bool:
        return (await mesh.gauges(worker))[f"tier_blocks_stored_total:{tier}"] >= wanted

    await mesh.until(are_stored)


async def test_prompts_come_back_from_memory_and_from_the_disk_of_a_worker_that_was_killed(
    tmp_path: Path,
) -> None:
    """Block by block out of vLLM's layout and into it, also by a worker that starts anew: each with
    the tokens of its first answer."""
    tiers: dict[str, dict[str, Any]] = {
        "dram": {"dram_cache": 1 << 30},
        "ssd": {"ssd_cache": tmp_path, "ssd_cache_size": 1 << 30},
    }
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            await mesh.add("decode", **VLLM, cache_prefixes=False)
            for tier, settings in tiers.items():
                prefill = await mesh.add("prefill", **FEW, **settings)
                await mesh.paired(gateway, 1)
                first = await ask_each(mesh, gateway)
                await stored(mesh, prefill, tier)
                if tier == "ssd":
                    await prefill.kill()
                    prefill = await mesh.add("prefill", **FEW, **settings)
                    await mesh.paired(gateway, 1)
                again = await ask_each(mesh, gateway)
                assert [one.tokens for one in again] == [one.tokens for one in first]
                assert {one.receipt[f"{tier}_tokens"] for one in again} == {CACHED}
                await mesh.home([gateway], [prefill])
                await prefill.kill()


async def test_a_prefix_comes_from_a_peer() -> None:
    """A worker that has it is busy: another takes its KV, and answers as if it had computed it."""
    settings = VLLM | {"batch_tokens": 256, "transfer_mode": "layerwise"}
    base = a_prompt(1472)
    # The second that the other one gets finds the pair, which the first asks for.
    prompts = [base + a_prompt(400, start=20 + idx) for idx in range(24)]
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [await mesh.start("prefill", **settings) for _ in range(2)]
            workers.append(await mesh.start("decode", **(VLLM | {"num_blocks": 1600})))
            await mesh.ready(*workers)
            await mesh.paired(gateway, 2)
            await mesh.ask(gateway, base, NUM_TOKENS)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(mesh.ask(gateway, it, NUM_TOKENS)) for it in prompts]
            together = [task.result() for task in asked]
            assert any(one.receipt["fetched_tokens"] for one in together)
            for prompt, answer in zip(prompts, together, strict=True):
                alone = await mesh.ask(gateway, prompt, NUM_TOKENS, cache_salt="another")
                assert alone.tokens == answer.tokens
            await mesh.home([gateway], workers)


async def test_homes_change_under_load_and_no_answer_shows_it() -> None:
    """Three workers that may be either: each does both, and what was begun ends where it is."""
    settings = VLLM | {"movable": True, "token_budget": 128}
    asked = [(a_prompt(20 + 17 * idx, start=idx), idx) for idx in range(16)]
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(policy="splitwise")
            workers = [
                await mesh.start(role, **settings) for role in ("prefill", "decode", "decode")
            ]
            await mesh.ready(*workers)
            url = f"http://127.0.0.1:{gateway.facts['http_port']}/cluster"
            async with aiohttp.ClientSession() as client:

                async def seen() -> list[dict[str, Any]]:
                    async with client.get(url) as response:
                        return (await response.json())["workers"]

                async def are_usable() -> bool:
                    return [it["state"] for it in await seen()] == ["usable"] * 3

                await mesh.until(are_usable)

                async def ask(prompt: list[int], seed: int) -> Answer:
                    params = {"temperature": 0.9, "seed": seed} if seed % 2 else {}
                    answer = await mesh.ask(gateway, prompt, 60, cache_salt=str(seed), **params)
                    answer.require_whole(60)
                    return answer

                alone = [(await ask(*it)).tokens for it in asked]
                num_moved = 0
                async with asyncio.TaskGroup() as tasks:
                    asking = [tasks.create_task(ask(*it)) for it in asked]
                    while not all(task.done() for task in asking):
                        for worker in await seen():
                            home = "token" if worker["home"] == "prompt" else "prompt"
                            at = f"{url}/workers/{worker['incarnation']}/role"
                            async with client.post(at, json={"role": home}) as response:
                                num_moved += response.status == 200
            assert [task.result().tokens for task in asking] == alone
            assert num_moved >= 3
            await mesh.home([gateway], workers)
