"""Many answers that follow a schema, over real processes and the bundled model, while their
workers are killed: all valid, and each the one that an undisturbed mesh gives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from tests.support.grammars import PERSON, needs_library
from tests.support.process_mesh import Answer, ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx, needs_library]

AT_ONCE = 8
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WORKERS: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}


async def ask(mesh: ProcessMesh, gateway: ServiceProcess, number: int) -> Answer:
    """One of the answers: greedy, or drawn with a seed of its own."""
    drawn = {"temperature": 0.9, "seed": number} if number % 3 else {}
    return await mesh.ask(
        gateway,
        f"Person number {number} is",
        160,
        ignore_eos=False,
        response_format=FORMAT,
        **drawn,
    )


async def ask_all(
    mesh: ProcessMesh, gateway: ServiceProcess, num_answers: int, done: list[int]
) -> list[str]:
    """All of them, a few at a time; done: how many are over."""
    texts: list[str] = [""] * num_answers
    numbers = iter(range(num_answers))

    async def some() -> None:
        for number in numbers:
            answer = await ask(mesh, gateway, number)
            assert not answer.errors, answer.errors
            assert answer.finish_reasons == ["stop"], answer
            texts[number] = answer.text
            done.append(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(some())
    return texts


@pytest.mark.parametrize(
    ("num_answers", "num_kills"),
    [
        pytest.param(32, 2, marks=pytest.mark.timeout(600)),
        pytest.param(1000, 24, marks=[pytest.mark.timeout(2400), pytest.mark.nightly]),
    ],
)
async def test_all_are_valid_and_the_undisturbed_ones_while_workers_die(
    num_answers: int, num_kills: int
) -> None:
    """Workers are killed, prefill and decode in turn, whenever another part of the answers is done;
    each gets a successor."""
    async with process_mesh("torch") as mesh:
        gateway = await mesh.start_gateway()
        workers = {role: [await mesh.add(role) for _ in range(2)] for role in WORKERS}
        await mesh.paired(gateway, 4)
        due = await ask_all(mesh, gateway, num_answers, [])
        for text in due:
            jsonschema.validate(json.loads(text), PERSON)
        assert len(set(due)) > num_answers / 10  # the model says what it likes within the schema
        with mesh.explained():
            done: list[int] = []
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(ask_all(mesh, gateway, num_answers, done))
                for kill in range(num_kills):
                    role = ("decode", "prefill")[kill % 2]

                    async def is_time(kill: int = kill) -> bool:
                        return len(done) > (kill + 1) * num_answers // (num_kills + 1)

                    await mesh.until(is_time, limit_s=200.0)
                    await workers[role].pop(0).kill()
                    workers[role].append(await mesh.add(role))
            assert asked.result() == due
        await mesh.home([gateway], [worker for some in workers.values() for worker in some])
