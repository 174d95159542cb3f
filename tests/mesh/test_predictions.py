"""Predictions in a whole mesh under virtual time, where a step takes exactly what the fake engine
says: what receipts predict is what comes."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.fake import FakeTiming
from shared.kv.prefix_hash import UNIT
from tests.support.grpc_client import Answer
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt

TIMING = FakeTiming(base_s=0.01, prefill_token_s=0.001)


async def asked_in_turn(mesh: WholeMesh, sizes: list[int]) -> list[Answer]:
    return [await mesh.ask(a_prompt(n, seed=i), 4) for i, n in enumerate(sizes)]


def error(answer: Answer) -> float:
    """By what share the prediction of its TTFT was off."""
    receipt = answer.receipt
    return abs(receipt["predicted_ttft_s"] - receipt["ttft_s"]) / receipt["ttft_s"]


@pytest.mark.parametrize("decode", [{}, {"colocated": True}])
@virtual_time
async def test_an_idle_mesh_is_predicted(decode: dict[str, bool]) -> None:
    """From the first answer on: the profile at the start has seen such prompts."""
    num_prefill = 0 if decode else 1
    async with whole_mesh(
        num_prefill=num_prefill, decode=decode, num_blocks=200, timing=TIMING
    ) as mesh:
        answers = await asked_in_turn(mesh, [20, 200, 77, 400, 9, 150])
        assert max(map(error, answers)) < 0.05
        prediction = mesh.gateways[0].mesh.cluster()["workers"][0]["prediction"]
        assert prediction["known"]
        assert prediction["believed"]


@virtual_time
async def test_a_burst_is_predicted_one_behind_the_other() -> None:
    """Prompts that come at once wait for each other; of most, the report has not been heard. They
    are computed one by one: what would come to share a step nobody can know."""
    alone = {"batch_tokens": 16}
    async with whole_mesh(num_prefill=1, prefill=alone, num_blocks=400, timing=TIMING) as mesh:
        await asked_in_turn(mesh, [20, 100])
        async with asyncio.TaskGroup() as tasks:
            asked = []
            for i, size in enumerate([300, 50, 120, 260, 40, 90, 310, 70]):
                asked.append(tasks.create_task(mesh.ask(a_prompt(size, seed=9 + i), 4)))
                await asyncio.sleep(0.02)
        errors = sorted(error(task.result()) for task in asked)
        assert max(task.result().receipt["ttft_s"] for task in asked) > 1.0
        assert errors[len(errors) // 2] < 0.05
        assert errors[-1] < 0.15


@pytest.mark.parametrize("policy", ["conductor", "least_loaded"])
@virtual_time
async def test_what_is_known_to_be_cached_is_predicted_and_judged(policy: str) -> None:
    """Prompts that begin alike: their time is foretold by who knows the caches, and counts for the
    worker's record; to who does not, they come sooner than said, and say nothing of the worker."""
    async with whole_mesh(
        gateway={"policy": policy}, num_decode=1, num_blocks=400, timing=TIMING
    ) as mesh:
        system = a_prompt(4 * UNIT, seed=1)
        await mesh.ask(system, 2)
        await asyncio.sleep(1.0)
        answers = [
            await mesh.ask([*system, *a_prompt(20, seed=9 + number)], 2) for number in range(8)
        ]
        assert {answer.receipt["cached_tokens"] for answer in answers} == {4 * UNIT}
        knows = policy == "conductor"
        for answer in answers:
            assert answer.receipt["predicted_cached_tokens"] == (4 * UNIT if knows else 0)
            assert (error(answer) < 0.05) is knows
        prediction = mesh.gateways[0].mesh.cluster()["workers"][0]["prediction"]
        assert (prediction["ttft_error"] is not None) is knows


@pytest.mark.slow
@virtual_time
async def test_a_worker_whose_predictions_are_wrong_is_routed_by_load_alone() -> None:
    """Its steps take twice as long as it says, minute after minute: it is not believed, and is
    again when they come true."""
    async with whole_mesh(num_prefill=1, num_decode=1, num_blocks=200, timing=TIMING) as mesh:
        worker = mesh.prefills[0].worker
        honest = worker.step_times.fits

        def flattering() -> object:
            prompts, answers = honest()
            return prompts._replace(constant_s=0.001, token_s=prompts.token_s / 2), answers

        worker.step_times.fits = flattering  # type: ignore[method-assign, assignment]

        def believed() -> bool:
            return mesh.gateways[0].mesh.cluster()["workers"][0]["prediction"]["believed"]

        for number in range(50):
            await mesh.ask(a_prompt(100, seed=100 + number), 2)
            await asyncio.sleep(2.0)
        assert not believed()
        worker.step_times.fits = honest  # type: ignore[method-assign]
        for number in range(50):
            await mesh.ask(a_prompt(100, seed=200 + number), 2)
            await asyncio.sleep(2.0)
        assert believed()
