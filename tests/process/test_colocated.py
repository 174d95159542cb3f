"""Colocated workers as real processes: a mesh without prefill workers serves, survives the death of
a worker amid answers, drains, and mixes with pairs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from services.gateway.text.text_model import TextModel
from shared.model_folder import ModelFolder, resolve_model
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, fake_ids, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]

NUM_TOKENS = 16
SETTINGS: dict[str, Any] = {"colocated": True, "token_budget": 64, "fake_step_s": 0.01}

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 20}


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[ProcessMesh]:
    """No process yet."""
    async with process_mesh() as mesh:
        with mesh.explained():
            yield mesh


@pytest.fixture(scope="module")
def name_of() -> Callable[[int], str]:
    """The name of a token, as the answers' logprobs give it."""
    text = TextModel.load(ModelFolder(resolve_model("demo")))
    return lambda token_id: text.piece(token_id).completion_name


async def status_of(gateway: ServiceProcess, path: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{gateway.facts['http_port']}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_two_workers_serve_alone_and_one_dies_amid_answers(
    mesh: ProcessMesh, name_of: Callable[[int], str]
) -> None:
    """/ready needs no prefill worker; every answer, greedy or sampled, that the dead worker had
    goes on with the same tokens on the other one, and every block comes home."""
    gateway = await mesh.start_gateway()
    assert (await status_of(gateway, "/ready"))[0] == 503
    workers = [await mesh.start("decode", **SETTINGS) for _ in range(2)]
    await mesh.ready(*workers)
    await mesh.paired(gateway, 2)
    assert (await status_of(gateway, "/ready"))[0] == 200

    has_begun = asyncio.Event()

    def watch(answer: Answer) -> None:
        if len(answer.tokens) >= 4:
            has_begun.set()

    prompts = [a_prompt(600 + number, start=number) for number in range(6)]
    samplings = [{"temperature": 0.0}, SAMPLED] * 3
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(mesh.ask(gateway, prompt, NUM_TOKENS, on_token=watch, **sampling))
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        await has_begun.wait()
        victim, survivor = workers
        await victim.kill()
    answers = [task.result() for task in asked]
    for answer, prompt, sampling in zip(answers, prompts, samplings, strict=True):
        answer.require_whole(NUM_TOKENS)
        assert answer.tokens == [name_of(i) for i in fake_ids(prompt, NUM_TOKENS, **sampling)]
        assert answer.receipt["mode"] == "colocated"
    assert {answer.receipt["attempts"] for answer in answers} == {1, 2}
    await mesh.home([gateway], [survivor])

    _, cluster = await status_of(gateway, "/cluster")
    (worker,) = cluster["workers"]
    assert (worker["role"], worker["paired"]) == ("decode", [worker["incarnation"]])


async def test_a_worker_that_is_told_to_end_finishes_what_it_has(
    mesh: ProcessMesh, name_of: Callable[[int], str]
) -> None:
    """SIGTERM amid a prompt: the answer is whole, the exit code says that nothing was cut."""
    gateway = await mesh.start_gateway()
    worker = await mesh.add("decode", **SETTINGS)
    await mesh.paired(gateway, 1)
    prompt = a_prompt(1500)

    async def has_it() -> bool:
        return (await mesh.gauges(worker))["requests_running"] > 0

    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(mesh.ask(gateway, prompt, NUM_TOKENS))
        await mesh.until(has_it)
        worker.send(signal.SIGTERM)
    answer = asked.result()
    answer.require_whole(NUM_TOKENS)
    assert answer.tokens == [name_of(token_id) for token_id in fake_ids(prompt, NUM_TOKENS)]
    assert await worker.ended() == 0


async def test_a_mixed_mesh_is_exact_both_ways(mesh: ProcessMesh) -> None:
    """A prefill worker pushes to a colocated worker, which computes other prompts itself."""
    gateway = await mesh.start_gateway(policy="round_robin")
    workers = [await mesh.start("prefill"), await mesh.start("decode", **SETTINGS)]
    await mesh.ready(*workers)
    await mesh.paired(gateway, 2)
    modes: set[str] = set()
    for number in range(4):
        prompt = a_prompt(300 + number, start=number)
        ids, receipt = await mesh.ask_grpc(gateway, prompt, NUM_TOKENS)
        assert ids == fake_ids(prompt, NUM_TOKENS)
        modes.add(receipt["mode"])
    assert "colocated" in modes
    assert len(modes) > 1
    await mesh.home([gateway], workers)
