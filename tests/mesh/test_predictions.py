"""Predictions in a whole mesh under virtual time, where a step takes exactly what the fake engine
says: what receipts predict is what comes."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.fake import FakeTiming
from tests.support.whole_mesh import Answer, WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt, virtual_time

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
