"""Workers that compute prompts and answers alike, under virtual time: the same tokens as ever, no
transfer, and no running answer that waits for somebody's prompt.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from shared.engine.fake import FakeEngine, FakeTiming
from shared.errors import DeadlinePassed, InvalidRequest, Overloaded, WorkerLost
from shared.predict.step_time import attended
from shared.request import SamplingParams
from shared.schedule.plan import StepPlan
from shared.worker.step_times import ProfileRange, StepTimes
from tests.support.cores import Worker, a_sequence
from tests.support.grpc_client import Answer
from tests.support.virtual_compute import VirtualCompute
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import MODEL, a_prompt, expected

SLOW = FakeTiming(base_s=0.02, prefill_token_s=0.001)
"""Steps long enough for a test to fall between them."""

CHUNKS = ProfileRange(max_tokens=2048, max_rows=0, target_s=0.1)

COLOCATED: dict[str, Any] = {"num_prefill": 0, "decode": {"colocated": True}}


@virtual_time
async def test_one_worker_serves_alone() -> None:
    """A mesh without a prefill worker is ready; the answer is right, and its receipt adds up and
    says that nothing was transferred."""
    async with whole_mesh(**COLOCATED) as mesh:
        assert mesh.gateways[0].mesh.is_ready
        prompt = a_prompt(70)
        answer = await mesh.ask(prompt, 12)
        assert answer.error is None
        assert answer.token_ids == expected(prompt, 12)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (70, 12)
        receipt = answer.receipt
        phases = ("queue_s", "route_s", "retry_s", "prefill_queue_s", "prefill_s", "handover_s")
        assert sum(receipt[name] for name in phases) == pytest.approx(receipt["ttft_s"], abs=2e-6)
        assert receipt["prefill_s"] > 0
        assert (receipt["transfer_bytes"], receipt["mode"]) == (0, "colocated")
        assert receipt["prefill"] == receipt["decode"] == f"{mesh.decodes[0].incarnation:016x}"


@virtual_time
async def test_many_clients_over_two_workers_are_all_exact() -> None:
    """Each answer is its own, of one token or of many, and both workers took part."""
    async with whole_mesh(**COLOCATED, num_decode=2, num_blocks=96) as mesh:
        prompts = [a_prompt(1 + 13 * i % 300, seed=i) for i in range(40)]
        answers = await _ask_all(mesh, prompts, 9)
        assert [a.token_ids for a in answers] == [expected(p, 9) for p in prompts]
        assert len({a.receipt["decode"] for a in answers}) == 2
        ones = await _ask_all(mesh, prompts, 1)
        assert [a.token_ids for a in ones] == [expected(p, 1) for p in prompts]


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded"])
@virtual_time
async def test_colocated_workers_mix_with_pairs(policy: str) -> None:
    """In one mesh some answers move from a prefill worker to a decode worker or to a colocated one,
    and others are made in one place: all are right."""
    gateway = {"policy": policy}
    async with whole_mesh(num_prefill=1, num_decode=1, num_blocks=96, gateway=gateway) as mesh:
        await mesh.start_worker("decode", colocated=True)
        await mesh.ready()
        prompts = [a_prompt(1 + 13 * i % 300, seed=i) for i in range(40)]
        answers = await _ask_all(mesh, prompts, 9)
        assert [a.token_ids for a in answers] == [expected(p, 9) for p in prompts]
        modes = {a.receipt["mode"] == "colocated" for a in answers}
        assert modes == {True, False}


@pytest.mark.parametrize("is_bound_by_time", [True, False])
@virtual_time
async def test_a_running_answer_does_not_wait_for_a_long_prompt(is_bound_by_time: bool) -> None:
    """Its tokens come within the target, from the first to the last chunk of a prompt that alone
    would hold it up for a second; with a number of tokens instead, within what those take."""
    target_s = 0.06
    # 20 ms a step and 1 ms a token: 40 tokens of prompt fit into 60 ms, 100 into 120.
    settings = {"tbt_target_s": target_s} if is_bound_by_time else {"token_budget": 100}
    limit_s = target_s if is_bound_by_time else 0.120
    mesh_settings = {**COLOCATED, "decode": {"colocated": True, **settings}}
    async with whole_mesh(**mesh_settings, num_blocks=200, timing=SLOW) as mesh:
        has_begun = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(
                mesh.ask(a_prompt(20), 60, on_token=lambda _: has_begun.set())
            )
            await has_begun.wait()
            long = tasks.create_task(mesh.ask(a_prompt(1000, seed=2), 4))
        answer = running.result()
        gaps = [after - before for before, after in pairwise(answer.arrived_at)]
        assert limit_s / 2 < max(gaps) < limit_s + 0.005
        assert answer.token_ids == expected(a_prompt(20), 60)
        assert long.result().token_ids == expected(a_prompt(1000, seed=2), 4)


@virtual_time
async def test_a_prompt_alone_is_one_step() -> None:
    """While nobody decodes there is no target to keep: 20 ms and 1 ms a token, once."""
    async with whole_mesh(**COLOCATED, num_blocks=200, timing=SLOW) as mesh:
        answer = await mesh.ask(a_prompt(1000), 3)
        assert answer.token_ids == expected(a_prompt(1000), 3)
        assert answer.receipt["prefill_s"] == pytest.approx(1.02, abs=0.005)
        assert mesh.decodes[0].worker.scheduler.statistics().num_steps <= 4


@virtual_time
async def test_an_answer_on_its_way_does_not_wait_for_a_long_prompt() -> None:
    """A prefill worker computes its prompt and will push; a prompt that is computed here meanwhile
    is cut into chunks, though nobody decodes yet."""
    target_s = 0.06
    decode = {"colocated": True, "tbt_target_s": target_s}
    settings: dict[str, Any] = {"decode": decode, "gateway": {"policy": "round_robin"}}
    async with whole_mesh(**settings, num_prefill=1, num_blocks=300, timing=SLOW) as mesh:
        turns = [(await mesh.ask(a_prompt(3), 2)).receipt["mode"] for _ in range(2)]
        assert "colocated" in turns
        if turns[-1] != "colocated":
            await mesh.ask(a_prompt(3), 2)  # so that the next one goes to the pair
        async with asyncio.TaskGroup() as tasks:
            pushed = tasks.create_task(mesh.ask(a_prompt(200), 20))
            await mesh.until(lambda: mesh.decodes[0].worker.leases.is_expecting)
            long = tasks.create_task(mesh.ask(a_prompt(1500, seed=2), 4))
        answer = pushed.result()
        assert answer.receipt["mode"] != "colocated"
        assert long.result().receipt["mode"] == "colocated"
        gaps = [after - before for before, after in pairwise(answer.arrived_at)]
        assert max(gaps) < 2 * target_s  # token 2: the step that runs, and its own
        assert answer.token_ids == expected(a_prompt(200), 20)
        assert not mesh.decodes[0].worker.leases.is_expecting


@virtual_time
async def test_a_profile_predicts_steps_it_has_not_seen() -> None:
    """Small and large chunks, early and late ones, within a tenth; the pool is left as it was."""
    timing = FakeTiming(base_s=0.01, prefill_token_s=0.0005)
    engine = FakeEngine(model=MODEL, num_blocks=200, block_size=16, timing=timing)
    loop, times = asyncio.get_running_loop(), StepTimes()
    assert times.predict(100, 100) == 0.0
    await times.profile(engine, VirtualCompute(engine), loop.time, CHUNKS, limit_s=9.0)
    for start, size in ((0, 40), (0, 150), (500, 100)):
        right = timing.base_s + size * timing.prefill_token_s
        assert times.predict(size, attended(start, start + size)) == pytest.approx(right, rel=0.1)


@virtual_time
async def test_the_profile_of_a_slow_device_tells_constant_and_tokens_apart() -> None:
    """Steps that take longer than the whole profile may: through one shape alone a step's constant
    would pass for the price of each position, and a long context for hundreds of steps."""
    timing = FakeTiming(base_s=0.2, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0)
    engine = FakeEngine(model=MODEL, num_blocks=1024, block_size=16, timing=timing)
    loop, times = asyncio.get_running_loop(), StepTimes()
    began_at = loop.time()
    await times.profile(engine, VirtualCompute(engine), loop.time, ProfileRange(2048, 64))
    assert loop.time() - began_at < 3.0
    prompts, answers = times.fits()
    assert prompts.seconds(100, attended(0, 100)) == pytest.approx(0.2, rel=0.05)
    assert answers.seconds(8, 8 * 500) == pytest.approx(0.2, rel=0.05)


@virtual_time
async def test_a_step_that_stood_still_says_little() -> None:
    """Of many steps one is no reason to expect others like it; if most are, it is."""
    engine = FakeEngine(model=MODEL, num_blocks=200, block_size=16, timing=SLOW)
    loop, times = asyncio.get_running_loop(), StepTimes()
    await times.profile(engine, VirtualCompute(engine), loop.time, CHUNKS, limit_s=9.0)
    before = times.predict(64, attended(0, 64))
    for seconds in (before, before, 100 * before):
        times.learn(_a_plan(64), seconds)
    assert times.predict(64, attended(0, 64)) == pytest.approx(before, rel=0.01)
    for _ in range(5):
        times.learn(_a_plan(64), 2 * before)
    assert times.predict(64, attended(0, 64)) == pytest.approx(2 * before, rel=0.1)


def _a_plan(num_tokens: int) -> StepPlan:
    worker = Worker(num_blocks=400, token_budget=2048, model=MODEL)
    worker.scheduler.add(a_sequence(num_tokens, max_tokens=1))
    return worker.scheduler.plan()


@virtual_time
async def test_a_target_below_every_step_is_never_met() -> None:
    """Whatever the line through the profile says of sizes that were not tried."""
    engine = FakeEngine(model=MODEL, num_blocks=200, block_size=16, timing=FakeTiming(base_s=0.01))
    loop, times = asyncio.get_running_loop(), StepTimes()
    wanted = CHUNKS._replace(target_s=1e-6)
    await times.profile(engine, VirtualCompute(engine), loop.time, wanted, limit_s=9.0)
    assert min(times.predict(size, attended(0, size)) for size in range(2048)) > 0.009


@virtual_time
async def test_a_repeated_prompt_is_told_as_cached() -> None:
    """The second time usage reports the prefix that was found, and computing is quicker."""
    async with whole_mesh(**COLOCATED, timing=SLOW) as mesh:
        prompt = a_prompt(100)
        first, second = await mesh.ask(prompt, 4), await mesh.ask(prompt, 4)
        assert first.token_ids == second.token_ids == expected(prompt, 4)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 96)
        assert second.receipt["prefill_s"] < first.receipt["prefill_s"] / 2


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@virtual_time
async def test_a_killed_worker_costs_a_pause_when_there_is_another(
    temperature: float, num_tokens: int
) -> None:
    """Before the first token, after it, and amid the answer: the other worker goes on with the
    same tokens, greedy or sampled."""
    async with whole_mesh(**COLOCATED, num_decode=2, timing=SLOW) as mesh:
        prompt = a_prompt(150)
        has_come = asyncio.Event()

        def watch(answer: Answer) -> None:
            if len(answer.token_ids) >= num_tokens:
                has_come.set()

        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(
                mesh.ask(prompt, 12, on_token=watch, temperature=temperature, seed=3)
            )
            await mesh.until(lambda: any(w.pool.num_held for w in mesh.decodes))
            victim = next(w for w in mesh.decodes if w.pool.num_held)
            if num_tokens:
                await has_come.wait()
            await mesh.kill(victim)
        answer = asked.result()
        assert answer.error is None
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
        assert answer.token_ids == expected(prompt, 12, params)
        assert answer.receipt["attempts"] == 2


@virtual_time
async def test_a_killed_worker_without_another_is_one_typed_error() -> None:
    """WorkerLost in bounded time; a worker that joins in time saves the answer instead."""
    async with whole_mesh(**COLOCATED, timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(150), 12))
            await mesh.until(lambda: mesh.decodes[0].pool.num_held)
            await mesh.kill(mesh.decodes[0])
            killed_at = loop.time()
        assert isinstance(asked.result().error, WorkerLost)
        assert loop.time() - killed_at <= 4.0
        assert "no prefill worker" in mesh.gateways[0].mesh.not_ready_reason
        victim = await mesh.start_worker("decode")
        await mesh.ready()
        async with asyncio.TaskGroup() as tasks:
            saved = tasks.create_task(mesh.ask(a_prompt(150), 12))
            await mesh.until(lambda: victim.pool.num_held)
            await mesh.kill(victim)
            await mesh.start_worker("decode")
        assert saved.result().token_ids == expected(a_prompt(150), 12)


@pytest.mark.parametrize("leave_after", [1, 3])
@virtual_time
async def test_a_client_that_hangs_up_frees_everything(leave_after: int) -> None:
    """The answer stops long before it would have ended."""
    async with whole_mesh(**COLOCATED, timing=SLOW) as mesh:
        await mesh.ask(a_prompt(100), 500, leave_after=leave_after)
        await mesh.until(lambda: all(not w.pool.num_held for w in mesh.workers), limit_s=1.0)


@pytest.mark.parametrize("num_prompt", [100, 1500])
@virtual_time
async def test_a_deadline_ends_the_request_everywhere(num_prompt: int) -> None:
    """Amid the answer and amid the prompt."""
    async with whole_mesh(**COLOCATED, num_blocks=200, timing=SLOW) as mesh:
        answer = await mesh.ask(a_prompt(num_prompt), 500, timeout_s=1.0)
        assert isinstance(answer.error, DeadlinePassed)
        assert bool(answer.token_ids) == (num_prompt == 100)
        await mesh.until(lambda: all(not w.pool.num_held for w in mesh.workers), limit_s=1.0)


@virtual_time
async def test_under_block_pressure_all_answers_are_exact() -> None:
    """Prompts wait for blocks, answers are preempted and recomputed beside others' prompts."""
    async with whole_mesh(**COLOCATED, num_blocks=24) as mesh:
        prompts = [a_prompt(40 + i, seed=i) for i in range(12)]
        answers = await _ask_all(mesh, prompts, 60)
        assert [a.token_ids for a in answers] == [expected(p, 60) for p in prompts]
        assert mesh.decodes[0].worker.scheduler.statistics().num_preemptions > 0


@virtual_time
async def test_blocks_that_a_reservation_gives_back_are_taken_at_once() -> None:
    """A prompt waits for blocks that are promised to a prefill worker's transfer; when that
    request's client hangs up, the prompt is computed, though nothing else happens."""
    gateway = {"policy": "round_robin"}
    endless = FakeTiming(base_s=30.0)
    async with whole_mesh(num_decode=0, num_blocks=16, gateway=gateway, timing=endless) as mesh:
        worker = await mesh.start_worker("decode", colocated=True, timing=SLOW)
        await mesh.ready()
        async with asyncio.TaskGroup() as tasks:
            promised = tasks.create_task(mesh.ask(a_prompt(150), 4))
            await mesh.until(lambda: worker.pool.num_held)
            waiting = tasks.create_task(mesh.ask(a_prompt(150, seed=2), 4))
            await mesh.until(lambda: worker.worker.scheduler.statistics().num_waiting)
            promised.cancel()
            async with asyncio.timeout(5.0):
                answer = await waiting
        assert answer.token_ids == expected(a_prompt(150, seed=2), 4)
        assert answer.receipt["mode"] == "colocated"


@virtual_time
async def test_too_much_is_refused() -> None:
    """More requests in hand than allowed, and what can never fit."""
    mesh_settings = {**COLOCATED, "decode": {"colocated": True, "max_requests": 1}}
    async with whole_mesh(**mesh_settings, num_blocks=8, timing=SLOW) as mesh:
        too_long = await mesh.ask(a_prompt(200), 4)
        assert isinstance(too_long.error, InvalidRequest)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(mesh.ask(a_prompt(40), 60))
            await mesh.until(lambda: mesh.decodes[0].pool.num_held)
            second = await mesh.ask(a_prompt(41), 4)
            assert isinstance(second.error, Overloaded)
        assert first.result().token_ids == expected(a_prompt(40), 60)


@virtual_time
async def test_a_drained_worker_loses_nothing() -> None:
    """Those it has are answered to the end, others go to the second worker."""
    async with whole_mesh(**COLOCATED, num_decode=2, timing=SLOW) as mesh:
        prompts = [a_prompt(30 + i, seed=i) for i in range(8)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(p, 20)) for p in prompts[:4]]
            await asyncio.sleep(0.2)
            mesh.decodes[0].stop.set()
            await asyncio.sleep(0.05)
            asked += [tasks.create_task(mesh.ask(p, 20)) for p in prompts[4:]]
        assert [t.result().token_ids for t in asked] == [expected(p, 20) for p in prompts]
        assert {t.result().receipt["attempts"] for t in asked} == {1}


@virtual_time
async def test_an_ordinary_decode_worker_computes_no_prompts() -> None:
    """It is no pair with itself, and an order that says so is refused before anything is held."""
    async with whole_mesh(num_prefill=0, num_decode=1) as mesh:
        members = mesh.gateways[0].members
        await mesh.until(lambda: len(members.table) == 1)
        assert members.table.sides.num_pairs == 0
        assert "no prefill worker has joined" in mesh.gateways[0].mesh.not_ready_reason
        refused = await mesh.ask(a_prompt(20), 4)
        assert isinstance(refused.error, WorkerLost)


async def _ask_all(mesh: WholeMesh, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(mesh.ask(prompt, num_tokens)) for prompt in prompts]
    answers = [task.result() for task in asked]
    assert not [answer.error for answer in answers if answer.error is not None]
    return answers
