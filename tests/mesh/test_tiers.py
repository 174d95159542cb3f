"""Memory below a worker's KV pool: what was evicted comes back, exactly, or is computed again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from shared.engine.fake import FakeTiming
from shared.errors import EngineFailed, InvalidRequest
from shared.kv.journal import key_of
from shared.kv.tiers import SlotState
from tests.support.fake_gateway import FakeRequest
from tests.support.tiers import few
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import WorkerMesh, a_prompt, expected, worker_mesh

SMALL: dict[str, Any] = {"prefill_blocks": 48, "prefill": {"dram_cache": 1 << 24}}
PROMPT = a_prompt(256, seed=1)
OTHERS = [a_prompt(256, seed=seed) for seed in range(2, 8)]


async def answered(request: FakeRequest, prompt: list[int], num: int = 8) -> int:
    """Return how many tokens of the prompt were not computed."""
    assert await request.finished() == expected(prompt, num)
    assert request.token is not None
    return request.token.cached_tokens


async def evicted(mesh: WorkerMesh) -> None:
    """Have a prompt's blocks go from the pool, for others'."""
    assert await answered(mesh.start(PROMPT), PROMPT) == 0
    for other in OTHERS:
        assert await answered(mesh.start(other), other) == 0


def is_quiet(tiers: Any) -> bool:
    """Nothing is copied, and nothing waits to be."""
    moving = any(level.queue or level.tier.num_moving for level in tiers.levels)
    return not moving and not tiers.tables()


async def settled(mesh: WorkerMesh) -> None:
    """Wait until nothing runs and nothing is copied any more, and see that all is accounted for."""
    await mesh.idle()  # a request that was cancelled may have frames on their way
    for running in (*mesh.prefills, *mesh.decodes):
        tiers = running.worker.tiers
        if running.lives and tiers is not None:
            await mesh.gateway.until(lambda tiers=tiers: is_quiet(tiers))
            for level in tiers.levels:
                level.tier.check_integrity()
                assert level.tier.num_moving == 0
            running.pool.check_integrity([])


@virtual_time
async def test_what_was_evicted_comes_back_from_memory() -> None:
    """A prompt that others have driven out of the pool is not computed again; without the memory it
    is."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        assert await answered(mesh.start(PROMPT), PROMPT) == 240  # the last token is computed
        await settled(mesh)
    async with worker_mesh(prefill_blocks=48) as mesh:
        await evicted(mesh)
        assert await answered(mesh.start(PROMPT), PROMPT) == 0


@virtual_time
async def test_copies_leave_a_prompt_s_beginning_in_the_pool() -> None:
    """With memory below it the pool gives up no more of a prompt than without, and from the end."""
    first, second = a_prompt(1024, seed=1), a_prompt(900, seed=2)
    for memory in (0, 1 << 24):
        settings: dict[str, Any] = {"prefill_blocks": 96, "prefill": {"dram_cache": memory}}
        async with worker_mesh(decode_blocks=256, **settings) as mesh:
            for prompt in (first, second):
                assert await answered(mesh.start(prompt), prompt) == 0
                await settled(mesh)
            pool = mesh.prefills[0].pool
            assert pool.num_cached_tokens(pool.new_chain(), first, 1024) == 624


@virtual_time
async def test_blocks_that_are_in_memory_already_hold_nobody_up() -> None:
    """A long prompt that is used again leaves a queue of which nothing is to be copied: the loop
    has turns while it is looked through."""
    prompt = a_prompt(1024, seed=1)
    settings: dict[str, Any] = {"prefill_blocks": 96, "prefill": {"dram_cache": 1 << 24}}
    async with worker_mesh(decode_blocks=256, **settings) as mesh:
        assert await answered(mesh.start(prompt), prompt) == 0
        await settled(mesh)
        prefill = mesh.prefills[0]
        (level,) = prefill.worker.tiers.levels
        prefill.pool.release(prefill.pool.pin(prefill.pool.new_chain(), prompt))
        lengths = [len(level.queue)]
        while lengths[-1]:
            await asyncio.sleep(0)
            lengths.append(len(level.queue))
        assert sorted({*lengths}) == [0, 16, 32, 48, 64]


@virtual_time
async def test_a_copy_that_fails_ends_the_worker() -> None:
    """A device that is lost while blocks go down is no cache that quietly does nothing."""
    async with worker_mesh(**SMALL) as mesh:
        running = mesh.prefills[0]

        def lost(*_: object) -> None:
            raise EngineFailed("device lost")

        running.worker.tiers.levels[0].arena._store = lost
        request = mesh.start(PROMPT)
        assert running.task is not None
        await asyncio.wait([running.task], timeout=60.0)
        assert isinstance(running.error, EngineFailed)
        request.cancel_decode()


@virtual_time
async def test_gateways_hear_what_lies_in_memory() -> None:
    """A prefix that went from the pool is told to lie below it, by its journal's count and keys."""
    async with worker_mesh(**SMALL) as mesh:
        prefill = mesh.prefills[0]
        prefill.worker.journal.subscribe("me", 128)
        await evicted(mesh)
        await settled(mesh)
        (key,) = {key_of(it) for it in prefill.pool.new_chain().hashes(PROMPT, 16)[15:]}
        report = prefill.worker.journal.report("me")
        pool, memory, _ = report.tiers
        assert key in memory.stored
        assert key not in pool.stored
        assert memory.num_keys == 2 * (1 + len(OTHERS))


@virtual_time
async def test_damaged_memory_is_a_miss() -> None:
    """A slot whose bytes have changed is not used, what lies before it is; the rest is computed."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        tiers = mesh.prefills[0].worker.tiers
        await settled(mesh)
        chain = mesh.prefills[0].pool.new_chain()
        keys = chain.hashes(PROMPT, 5)
        (level,) = tiers.levels
        slots = level.tier.begin_load(keys)
        level.tier.end_load(keys)
        level.arena.bytes[slots[4], 7] ^= 1
        assert await answered(mesh.start(PROMPT), PROMPT) == 64
        assert await answered(mesh.start(PROMPT), PROMPT) == 240  # computed, and in the pool
        await settled(mesh)


@virtual_time
async def test_tenants_do_not_find_each_other_s_blocks() -> None:
    """Another salt finds nothing in memory either."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        assert await answered(mesh.start(PROMPT, salt=b"other"), PROMPT) == 0
        await settled(mesh)


@virtual_time
async def test_prompts_that_begin_alike_wait_for_one_load() -> None:
    """Two that ask for the same blocks at once share them."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        both = [mesh.start(PROMPT), mesh.start(PROMPT)]
        assert [await answered(it, PROMPT) for it in both] == [240, 240]
        await settled(mesh)


@virtual_time
async def test_prompts_that_part_after_a_block_load_what_is_theirs() -> None:
    """Two that ask at once for what begins alike and goes on otherwise each get all of it."""
    async with worker_mesh(**SMALL) as mesh:
        prompts = [PROMPT[:32] + a_prompt(160, seed=seed) for seed in (31, 32)]
        for prompt in (*prompts, *OTHERS):
            await answered(mesh.start(prompt), prompt)
        both = [mesh.start(prompt) for prompt in prompts]
        for request, prompt in zip(both, prompts, strict=True):
            assert await answered(request, prompt) == 176
            assert request.token is not None
            assert request.token.dram_tokens == 176
        await settled(mesh)


@virtual_time
async def test_what_comes_late_and_before_the_prompt_is_let_in_counts() -> None:
    """A load that is given up, but ends before its prompt had its turn, is told by its tier; and
    the worker reports from then on what a token's load takes."""
    async with worker_mesh(**SMALL, timing=FakeTiming(base_s=3.0)) as mesh:
        await evicted(mesh)
        await settled(mesh)
        level = mesh.prefills[0].worker.tiers.levels[0]
        level.arena._compute._copy_s = 1.5
        assert mesh.prefills[0].worker.load().dram_token_s == 0.0
        other = a_prompt(64, seed=50)
        busy = mesh.start(other)
        await asyncio.sleep(0.1)
        request = mesh.start(PROMPT)
        assert await answered(request, PROMPT) == 240
        assert request.token is not None
        assert request.token.dram_tokens == 240
        reported = mesh.prefills[0].worker.load()
        assert (reported.dram_token_s, reported.ssd_token_s) == (pytest.approx(1.5 / 240), 0.0)
        level.arena._compute._copy_s = 0.0
        await answered(busy, other)
        await settled(mesh)


@virtual_time
async def test_a_late_load_is_given_up() -> None:
    """A prompt waits for its load no longer than its limit; then it is computed, and the load does
    no harm when it ends after all."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        await settled(mesh)
        tiers = mesh.prefills[0].worker.tiers
        tiers.levels[0].arena._compute._copy_s = 3.0
        began_at = asyncio.get_running_loop().time()
        request = mesh.start(PROMPT[:250])
        await mesh.gateway.until(lambda: request.token is not None)
        assert 1.0 <= asyncio.get_running_loop().time() - began_at < 30.0
        assert await answered(request, PROMPT[:250]) == 0
        tiers.levels[0].arena._compute._copy_s = 0.0
        await settled(mesh)


@virtual_time
async def test_what_is_quicker_to_compute_is_computed() -> None:
    """A load that is predicted to take longer than the step is not begun."""
    async with worker_mesh(**SMALL, timing=FakeTiming()) as mesh:
        await evicted(mesh)
        mesh.prefills[0].worker.tiers.levels[0].block_s.add(10.0)
        assert await answered(mesh.start(PROMPT), PROMPT) == 0
        await settled(mesh)


@pytest.mark.parametrize("kind", ["store", "load"])
@virtual_time
async def test_a_worker_that_dies_while_it_copies_takes_nobody_along(kind: str) -> None:
    """Killed in the middle of a store or a load, its requests fail; the other workers have all
    their blocks and answer."""
    async with worker_mesh(num_prefill=2, **SMALL) as mesh:
        await evicted(mesh)
        await settled(mesh)
        first = mesh.prefills[0]
        tiers = first.worker.tiers
        tiers.levels[0].arena._compute._copy_s = 0.4
        prompt = PROMPT if kind == "load" else a_prompt(256, seed=99)
        request = mesh.start(prompt)
        state = SlotState.LOADING if kind == "load" else SlotState.STORING
        entries = tiers.levels[0].tier._entries
        await mesh.gateway.until(lambda: any(it.state is state for it in entries.values()))
        await mesh.kill(first)
        request.cancel_decode()
        assert await answered(mesh.start(PROMPT, p=1), PROMPT) == 0
        await mesh.idle()


@pytest.mark.parametrize("kind", ["store", "load"])
@virtual_time
async def test_a_gateway_that_dies_while_its_prompt_s_blocks_are_copied_loses_none(
    kind: str,
) -> None:
    """Blocks of a prompt that nobody wants any more go down all the same; those that come up are
    there for the next one, and another gateway's prompt that waits for them has them."""
    async with worker_mesh(**SMALL) as mesh:
        await evicted(mesh)
        await settled(mesh)
        tiers = mesh.prefills[0].worker.tiers
        (level,) = tiers.levels
        level.arena._compute._copy_s = 0.4
        prompt = PROMPT if kind == "load" else a_prompt(256, seed=99)
        mesh.start(prompt, by=mesh.other_gateway)
        waits = mesh.start(prompt, request_id=b"w" * 16) if kind == "load" else None
        state = SlotState.LOADING if kind == "load" else SlotState.STORING
        entries = level.tier._entries
        async with asyncio.timeout(5.0):
            while not any(it.state is state for it in entries.values()):
                await asyncio.sleep(0.01)
        mesh.network.fabric.kill("other-gateway")
        if waits is not None:
            assert await answered(waits, PROMPT) == 240
        await settled(mesh)
        assert level.tier.num_found(mesh.prefills[0].pool.new_chain().hashes(prompt, 15)) == 15
        assert await answered(mesh.start(prompt), prompt) == 240


@pytest.mark.parametrize("policy", few(["lru", "lfu", "length-aware"], "lru"))
def test_a_storm_gives_no_wrong_token(policy: str) -> None:
    """Conversations that share beginnings, in a pool and a memory too small for them, cancelled at
    any time, with slow copies and damaged slots: every answer is the right one, and no block is
    lost in any tier."""

    @virtual_time
    async def storm() -> None:
        chance = random.Random(policy)
        settings = {"dram_cache": 1 << 17, "cache_policy": policy}
        async with worker_mesh(
            num_prefill=2,
            prefill_blocks=40,
            decode_blocks=96,
            prefill=settings,
            decode=settings,  # which computes no prompts, and so has none
            timing=FakeTiming(),
        ) as mesh:
            roots = [a_prompt(chance.randrange(32, 300), seed=it) for it in range(5)]
            running: list[tuple[FakeRequest, list[int]]] = []
            for idx in range(80):
                for worker in mesh.prefills:
                    tiers = worker.worker.tiers
                    tiers.levels[0].arena._compute._copy_s = chance.choice([0.0, 0.0005, 0.02])
                    if chance.random() < 0.1:
                        (level,) = tiers.levels
                        if not level.tier.num_moving:
                            level.arena.bytes[chance.randrange(level.arena.num_slots), 0] ^= 1
                prompt = chance.choice(roots) + a_prompt(chance.randrange(1, 60), seed=idx % 7)
                request = mesh.start(prompt, p=chance.randrange(2))
                running.append((request, prompt))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() * 0.05)
                    request.cancel()
                    running.pop()
                elif len(running) > 3:
                    await answered(*running.pop(0))
            for request, prompt in running:
                await answered(request, prompt)
            await settled(mesh)
            assert mesh.decodes[0].worker.tiers is None
            count = mesh.prefills[0].worker.prompt_metrics.registry.get_sample_value
            for name in ("tier_blocks_stored_total", "tier_tokens_loaded_total"):
                assert count(f"pdmesh_prefill_{name}", {"tier": "dram"}), name

    storm()


@virtual_time
async def test_memory_that_holds_no_block_is_refused() -> None:
    """Too small, or more than the machine has, is a clear error at start."""
    for num_bytes, text in ((1, "not one KV block"), (1 << 49, "more than")):
        with pytest.raises((InvalidRequest, ExceptionGroup)) as failed:
            async with worker_mesh(prefill={"dram_cache": num_bytes}):
                pass
        error: BaseException = failed.value
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert text in str(error)
