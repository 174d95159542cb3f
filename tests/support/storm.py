"""A storm of faults on a whole mesh under virtual time: clients that come and leave, workers that
are killed and cut off, all by one seed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from services.gateway.limits import seed_of_choice
from shared.errors import Overloaded, WorkerLost
from shared.request import SamplingParams
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import RunningWorker, a_prompt, expected, virtual_time

NUM_CLIENTS = 40

PATIENCE_S = 200.0
"""Of a client; whoever runs out of it was forgotten by somebody."""


def storm(
    seed: int,
    roles: list[str],
    *,
    meanwhile: Callable[[WholeMesh], Coroutine[Any, Any, None]] | None = None,
    **options: Any,
) -> str:
    """Run one storm and return a digest of everything that clients saw, and when.

    Every answer must be exact, as far as it came, or end with a typed error. roles: of the workers
    that are struck; the last of a role is never killed. meanwhile: what else goes on. options: of
    ``whole_mesh``.
    """
    history = hashlib.sha256()

    @virtual_time
    async def run() -> None:
        chance = random.Random(seed)
        async with whole_mesh(**options, seed=seed) as mesh, asyncio.TaskGroup() as tasks:
            tasks.create_task(_chaos(mesh, chance, roles))
            if meanwhile is not None:
                tasks.create_task(meanwhile(mesh))
            for number in range(NUM_CLIENTS):
                tasks.create_task(_client(mesh, chance, number, history))

    run()
    return history.hexdigest()


def sampled(prompt: list[int], num_tokens: int, temperature: float, seed: int) -> list[int]:
    """Return the answer of an undisturbed engine to a request with a seed."""
    params = SamplingParams(
        max_tokens=num_tokens, temperature=temperature, seed=seed_of_choice(seed, 0)
    )
    return expected(prompt, num_tokens, params)


async def _client(mesh: WholeMesh, chance: random.Random, number: int, history: Any) -> None:
    await asyncio.sleep(chance.uniform(0, 6))
    prompt = a_prompt(chance.randrange(1, 200), seed=number % 7)
    num_tokens = chance.randrange(1, 24)
    leave_after = chance.choice([None, None, None, 1, 5])
    temperature = chance.choice([0.0, 0.9])
    answer = await mesh.ask(
        prompt,
        num_tokens,
        timeout_s=PATIENCE_S,
        leave_after=leave_after,
        temperature=temperature,
        seed=number,
    )
    right = sampled(prompt, num_tokens, temperature, number)
    assert answer.token_ids == right[: len(answer.token_ids)]
    if answer.error is None and leave_after is None:
        assert answer.token_ids == right
    if answer.error is not None:
        assert isinstance(answer.error, WorkerLost | Overloaded), answer.error
    history.update(f"{number} {answer}".encode())


async def _chaos(mesh: WholeMesh, chance: random.Random, roles: list[str]) -> None:
    for _ in range(6):
        await asyncio.sleep(chance.uniform(0.3, 1.2))
        role = chance.choice(roles)
        victims = [worker for worker in mesh.workers if worker.host.startswith(role)]
        # KV that travels slowly is struck, too.
        mesh.fabric.settings = replace(
            mesh.fabric.settings, bytes_per_s=chance.choice([1e9, 1e9, 2e4])
        )
        if chance.random() < 0.3:
            _break_streams(mesh, chance, chance.choice(victims))
        elif chance.random() < 0.4:
            mesh.network.fabric.partition(victims[0].host, "gateway-0")
            await asyncio.sleep(chance.uniform(0.5, 4))
            mesh.network.fabric.heal()
        elif len(victims) > 1:
            await mesh.kill(chance.choice(victims))
            await mesh.start_worker(role)


def _break_streams(mesh: WholeMesh, chance: random.Random, victim: RunningWorker) -> None:
    """Streams of one kind end, and the processes at both ends live on."""
    gateway, lost = mesh.gateways[0], WorkerLost("for a test")
    match chance.choice(["sessions", "pairs", "membership"]):
        case "sessions":
            for session in [it for it in gateway.members.sessions.values() if it.num_legs][:2]:
                session._control.close(lost)
        case "pairs":
            for link in list(victim.worker.pairs._links.values()):
                link.lose(lost)
        case _:
            victim.worker._life.rejoin(gateway.gateway.incarnation)
