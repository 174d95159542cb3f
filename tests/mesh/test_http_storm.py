"""Requests of all kinds at once, as clients send them over HTTP, while workers are killed, roles
move and gateways leave: every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from shared.engine.fake import FakeModel, FakeTiming
from shared.errors import MeshError
from tests.support.grammars import PERSON, needs_library
from tests.support.guided_engine import GuidedFakeEngine
from tests.support.memory_http import Door, memory_doors, post
from tests.support.tiers import in_turn
from tests.support.tiny_tokenizer import EOS, NUM_TOKENS
from tests.support.virtual_loop import run_virtual
from tests.support.whole_mesh import RunningGateway, WholeMesh, whole_mesh

pytestmark = needs_library

NUM_CLIENTS = 16
MODEL = FakeModel(vocab_size=NUM_TOKENS, max_model_len=2048, eos_token_ids=(EOS,), eos_every=30)
KEEP = {"max_attempts": 6, "failover_wait_s": 10.0, "max_wait_s": 60.0}
"""No fault here is a reason to refuse anybody."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("seed", in_turn(range(3), of=2))
def test_every_answer_is_the_undisturbed_one(seed: int) -> None:
    """Several answers to a prompt, JSON of a schema, calls, stop strings and logprobs, mixed."""
    chance = random.Random(seed)
    asked = [_request(chance) for _ in range(NUM_CLIENTS)]
    due: list[Any] = []

    async def calm() -> None:
        with memory_doors() as doors:
            async with a_mesh():
                due.extend([await _said(doors[0], *one) for one in asked])

    async def storm() -> None:
        either = {"movable": True, "block_size": chance.choice([4, 16])}
        with memory_doors() as doors:
            async with (
                a_mesh(
                    num_gateways=2, num_prefill=2, num_decode=2, prefill=either, decode=either
                ) as mesh,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(_faults(mesh, chance))
                for number in range(NUM_CLIENTS):
                    tasks.create_task(client(mesh, doors, number))

    async def client(mesh: WholeMesh, doors: list[Door], number: int) -> None:
        await asyncio.sleep(chance.uniform(0, 4))
        gateway = chance.choice(_open(mesh))
        said = await _said(doors[mesh.gateways.index(gateway)], *asked[number])
        assert said == due[number], asked[number]

    run_virtual(calm())
    run_virtual(storm())


def a_mesh(**settings: Any) -> Any:
    timing = FakeTiming(base_s=0.02, prefill_token_s=0.001)
    return whole_mesh(
        engine=GuidedFakeEngine,
        model=MODEL,
        timing=timing,
        num_blocks=160,
        gateway=KEEP,
        **settings,
    )


def _open(mesh: WholeMesh) -> list[RunningGateway]:
    return [it for it in mesh.gateways if it.lives and not it.stop.is_set()]


async def _faults(mesh: WholeMesh, chance: random.Random) -> None:
    for _ in range(6):
        await asyncio.sleep(chance.uniform(0.1, 0.9))
        victim = chance.choice(mesh.workers)
        match chance.choice(["kill", "kill", "move", "gateway"]):
            case "kill":
                await mesh.kill(victim)
                await mesh.start_worker(victim.host.partition("-")[0])
            case "move":
                home = chance.choice(["prompt", "token"])
                with contextlib.suppress(MeshError):  # the last of its role stays
                    await _open(mesh)[0].mesh.change_role(f"{victim.incarnation:016x}", home)
            case _:
                _open(mesh)[0].stop.set()
                await mesh.start_gateway()


async def _said(door: Door, route: str, body: dict[str, Any]) -> Any:
    """What an answer says, without its ids."""
    status, answer = await post(door, route, body)
    assert status == 200, answer
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return answer["choices"], answer["usage"]["completion_tokens"]


def _request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(chance.choices(["the", "and", "hello", "a", "1"], k=chance.randrange(1, 30)))
    body: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 60),
        "temperature": chance.choice([0.0, 1.0]),
        "seed": chance.randrange(1 << 30),
        "n": chance.choice([1, 1, 3]),
    }
    if chance.random() < 0.5:
        body["stop"] = chance.choice([["e"], ["a", "th"], [" "], ['"name', "z"]])
    if chance.random() < 0.5:
        body |= {"prompt": [text, f"{text} the"], "logprobs": chance.randrange(4)}
        return "/v1/completions", body
    body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}
    if chance.random() < 0.4:
        schema = {"name": "x", "schema": PERSON}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif chance.random() < 0.6:
        body |= {"tools": [TOOL], "tool_choice": chance.choice(["required", TOOL])}
    return "/v1/chat/completions", body
