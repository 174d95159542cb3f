"""Who waits in a gateway hears of workers: of one that joins, of all that are silent, and of the
other gateways' requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from services.gateway.workers.generation import GatewayMesh
from shared.engine.fake import FakeTiming
from tests.support.grpc_client import Answer
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt

LONG = FakeTiming(base_s=0.02, prefill_token_s=0.005)
"""Ten seconds for a prompt of 2,000 tokens."""


def waiting(mesh: WholeMesh, gateway: int = 0) -> int:
    front: GatewayMesh = mesh.gateways[gateway].mesh
    return front.statistics.num_waiting


@virtual_time
async def test_a_worker_that_joins_has_prompts_as_soon_as_it_is_paired() -> None:
    """While the other one has seconds to go until its next first token."""
    async with whole_mesh(num_blocks=4096, timing=LONG) as mesh, asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(mesh.ask(a_prompt(1900, seed=number), 1))
        await mesh.until(lambda: waiting(mesh) == 3)
        new = await mesh.start_worker("prefill")
        await mesh.ready()
        joined_at = asyncio.get_running_loop().time()
        await mesh.until(lambda: new.worker.load().num_prompts)
        assert asyncio.get_running_loop().time() < joined_at + 0.1
        assert waiting(mesh) == 0


@virtual_time
async def test_who_comes_does_not_wait_for_the_answers_of_a_worker_that_drains() -> None:
    """It holds as many as another one runs at once, which is idle."""
    async with (
        whole_mesh(num_blocks=4096, decode={"max_running": 4}) as mesh,
        asyncio.TaskGroup() as tasks,
    ):
        (old,), loop = mesh.decodes, asyncio.get_running_loop()
        for number in range(4):
            tasks.create_task(mesh.ask(a_prompt(20, seed=number), 400))
        await mesh.until(lambda: old.worker.load().num_running == 4)
        await mesh.start_worker("decode")
        await mesh.ready()
        old.stop.set()
        await mesh.until(lambda: mesh.gateways[0].members.table.sides.num_pairs == 1)
        began_at = loop.time()
        answer = await mesh.ask(a_prompt(20, seed=9), 4)
        assert answer.error is None
        assert old.worker.load().num_running == 4
        assert loop.time() < began_at + 1.0


@virtual_time
async def test_while_all_workers_are_silent_the_order_stays_and_all_hear_of_it_at_once() -> None:
    """Who waited before, and comes meanwhile, is not sent to nobody one by one: all hear of it
    when it has lasted as long as anybody may wait, or are answered in their order."""
    short = FakeTiming(base_s=0.02, prefill_token_s=0.001)
    ended: list[tuple[int, float, Answer]] = []

    async def ask(number: int, **terms: int) -> None:
        answer = await mesh.ask(a_prompt(500, seed=number), 1, terms=terms)
        ended.append((number, asyncio.get_running_loop().time(), answer))

    async with whole_mesh(num_blocks=4096, timing=short) as mesh:
        network, loop = mesh.network.fabric, asyncio.get_running_loop()
        table = mesh.gateways[0].members.table
        network.partition("prefill-0", "gateway-0")
        await mesh.until(lambda: not table.sides)
        async with asyncio.TaskGroup() as tasks:
            began_at = loop.time()
            for number in range(40):
                tasks.create_task(ask(number))
        assert [it.error and it.error.code for _, _, it in ended] == ["no_pair"] * 40
        assert max(at for _, at, _ in ended) < began_at + 2.1
        ended.clear()
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 10):
                tasks.create_task(ask(number))
                await asyncio.sleep(0.02)
            tasks.create_task(ask(0, priority=7))
            network.heal()
        assert [it.error for _, _, it in ended] == [None] * 10
        at = dict(sorted((number, at) for number, at, _ in ended))  # some in one step
        assert all(after > before - 0.01 for before, after in pairwise(at.values())), str(at)


@virtual_time
async def test_workers_that_may_move_are_no_reason_to_refuse_nobody() -> None:
    """Those at home with tokens are idle, but no prompt is sent there: who would be late behind
    those at home with prompts is refused."""
    settings = {"gateway": {"policy": "least_loaded", "overload": "early"}}
    movable, short = {"movable": True}, FakeTiming(base_s=0.02, prefill_token_s=0.001)
    async with whole_mesh(
        **settings, prefill=movable, decode=movable, num_blocks=4096, timing=short
    ) as mesh:
        for number in range(12):  # workers learn how long their steps take
            await mesh.ask(a_prompt(100, seed=number), 4)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    mesh.ask(a_prompt(500, seed=100 + number), 4, terms={"ttft_ms": 1500.0})
                )
                for number in range(8)
            ]
        codes = Counter(it.result().error and it.result().error.code for it in asked)
        assert codes["slo_ttft"] >= 4, codes
        assert sum(codes.values()) == 8


@virtual_time
@pytest.mark.parametrize("num_asked", [1, 3])
async def test_three_gateways_give_workers_hardly_more_than_one_does(num_asked: int) -> None:
    """A burst of prompts at each of three, or at one of them alone: what the workers have ahead is
    about what one gateway gives them, and all places of decode are taken. Measured: 9,700 tokens
    and 40 answers (each with a bound of its own: 25,200 and 59), and of one 8,400 and 29."""
    quick = FakeTiming(base_s=0.02, prefill_token_s=0.0001)
    most_tokens = most_answers = most_running = 0
    async with whole_mesh(
        num_gateways=3, num_blocks=1 << 14, timing=quick, decode={"max_running": 16}
    ) as mesh:
        prefill, decode = mesh.prefills[0].worker, mesh.decodes[0].worker

        async def ask_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(75):
                    prompt = a_prompt(600, seed=number)
                    tasks.create_task(mesh.ask(prompt, 60, gateway=number % num_asked))

        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask_all())
            while not asked.done():
                await asyncio.sleep(0.02)
                load = decode.load()
                most_tokens = max(most_tokens, prefill.load().pending_tokens)
                most_answers = max(most_answers, load.num_answers)
                most_running = max(most_running, load.num_running)
    assert 8192 - 600 <= most_tokens <= 10_900
    # Those whose prompts are under way when all places are taken will come as well.
    assert 16 <= most_answers <= 16 * 5 / 3 + most_tokens / 600
    assert most_running >= 16
