"""Answers that follow a grammar, in a whole mesh under virtual time: valid, and the undisturbed
ones wherever they are cut."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import Future
from typing import Any

import pytest

from shared.engine.fake import FakeTiming
from shared.messages.columns import pack_u32
from tests.support.grammars import PERSON, needs_library
from tests.support.grpc_client import Answer
from tests.support.guided_engine import GuidedFakeEngine
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt

pytestmark = needs_library

SLOW = FakeTiming(base_s=0.02, prefill_token_s=0.001)
SCHEMA = json.dumps(PERSON)
LONG = 400


def text_of(answer: Answer) -> str:
    return tiny_tokenizer().decode(answer.token_ids[:-1])


def require_valid(answer: Answer) -> None:
    assert answer.error is None
    value = json.loads(text_of(answer))
    assert set(value) == {"name", "age", "tags"}


def a_mesh(**settings: Any) -> Any:
    return whole_mesh(engine=GuidedFakeEngine, timing=SLOW, **settings)


async def ask(mesh: WholeMesh, number: int, **more: Any) -> Answer:
    """One of many answers, each with a prompt and draws of its own."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    prompt = a_prompt(20 + number, seed=number)
    return await mesh.ask(prompt, LONG, json_schema=SCHEMA, **drawn, **more)


@virtual_time
async def test_answers_are_valid_and_the_same_alone_and_together() -> None:
    """Guided and free answers share steps, with look-ahead and without; logprobs come, too."""
    async with a_mesh() as mesh:
        alone = [await ask(mesh, number) for number in range(6)]
        free = await mesh.ask(a_prompt(30), 20)
        async with asyncio.TaskGroup() as tasks:
            together = [
                tasks.create_task(ask(mesh, number, **({"logprobs": 2} if number == 3 else {})))
                for number in range(6)
            ]
            beside = tasks.create_task(mesh.ask(a_prompt(30), 20))
    async with a_mesh(prefill={"look_ahead": False}, decode={"look_ahead": False}) as mesh:
        plain = [await ask(mesh, number) for number in range(2)]
    for answer in alone:
        require_valid(answer)
    assert [task.result().token_ids for task in together] == [one.token_ids for one in alone]
    assert beside.result().token_ids == free.token_ids
    assert [one.token_ids for one in plain] == [one.token_ids for one in alone[:2]]


@pytest.mark.slow
@virtual_time
async def test_the_same_answer_after_a_worker_is_killed_anywhere() -> None:
    """Before the first token and amid the answer, prefill or decode: the same text, valid."""
    async with a_mesh() as mesh:
        due = await ask(mesh, 1)
    require_valid(due)
    for role in ("prefill", "decode"):
        for cut in (0, 1, 2, len(due.token_ids) // 2, len(due.token_ids) - 1):
            async with a_mesh(num_prefill=2, num_decode=2) as mesh:
                reached = asyncio.Event()

                def watch(answer: Answer, cut: int = cut, at: asyncio.Event = reached) -> None:
                    if len(answer.token_ids) >= cut:
                        at.set()

                async with asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(ask(mesh, 1, on_token=watch))
                    await (reached.wait() if cut else asyncio.sleep(0.03))
                    workers = mesh.prefills if role == "prefill" else mesh.decodes
                    victim = next((one for one in workers if one.pool.num_held), workers[0])
                    await mesh.kill(victim)
            assert task.result().error is None
            assert task.result().token_ids == due.token_ids, (role, cut)


@virtual_time
async def test_the_same_answer_after_preemption() -> None:
    """More answers than a small pool has room for: some are recomputed, none differs."""
    async with a_mesh() as mesh:
        due = [await ask(mesh, number) for number in range(8)]
    async with a_mesh(num_blocks=30, decode={"colocated": True}, num_prefill=0) as mesh:
        await ask(mesh, 0)  # The grammar is compiled in real time; the others begin together.
        async with asyncio.TaskGroup() as tasks:
            got = [tasks.create_task(ask(mesh, number)) for number in range(8)]
        preempted = sum(it.worker.scheduler.statistics().num_preemptions for it in mesh.decodes)
    assert preempted
    assert [task.result().token_ids for task in got] == [one.token_ids for one in due]


class SlowToCompile(GuidedFakeEngine):
    """Every grammar is ready when the test says so."""

    ready: Future[None] = Future()

    def expect(self, grammar: str) -> Future[Any]:
        made, told = super().expect(grammar), Future[Any]()
        self.ready.add_done_callback(lambda _: told.set_result(made.result()))
        return told


@pytest.mark.parametrize(("prefill", "is_known"), [(0, False), (1, False), (1, True)])
@virtual_time
async def test_a_grammar_that_takes_its_time_holds_nobody_up(prefill: int, is_known: bool) -> None:
    """Others go on while it is made ready, on workers of either kind, and then it is followed; who
    leaves before is forgotten. is_known: by the prefill worker, and so decode alone waits."""
    SlowToCompile.ready = Future()
    settings: dict[str, Any] = {} if prefill else {"decode": {"colocated": True}}
    async with whole_mesh(engine=SlowToCompile, num_prefill=prefill, **settings) as mesh:
        if is_known:
            mesh.prefills[0].engine.ready = Future()
            mesh.prefills[0].engine.ready.set_result(None)
        async with asyncio.TaskGroup() as tasks:
            guided = tasks.create_task(ask(mesh, 1))
            leaves = tasks.create_task(ask(mesh, 2))
            await asyncio.sleep(0.3)
            leaves.cancel()
            assert (await mesh.ask(a_prompt(30), 20)).error is None
            assert not guided.done()
            SlowToCompile.ready.set_result(None)
        require_valid(guided.result())
        await mesh.idle()
        mesh.assert_nothing_left()


@virtual_time
async def test_a_worker_that_knows_no_grammars_refuses() -> None:
    """One typed error that names the remedy; free answers go on, and nothing is held."""
    async with whole_mesh() as mesh:
        answer = await mesh.ask(a_prompt(20), 10, json_schema=SCHEMA)
        assert answer.error is not None
        assert (answer.error.type, answer.error.code) == ("invalid_request", "unsupported")
        assert (await mesh.ask(a_prompt(20), 10)).error is None


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("json_schema", "{", "json_schema"),
        ("json_schema", '{"$ref": "#"}', "json_schema"),
        ("regex", "(a", "regex"),
        ("grammar", "start: nobody", "grammar"),
        ("choice", ["x"] * 1025, "choice"),
    ],
)
@virtual_time
async def test_what_grpc_refuses(field: str, value: Any, param: str) -> None:
    """The same words as over HTTP, before any worker hears of it."""
    async with a_mesh() as mesh:
        answer = await mesh.ask(a_prompt(20), 10, **{field: value})
        assert answer.error is not None
        assert (answer.error.type, answer.error.param) == ("invalid_request", param)
        two = await mesh.ask(a_prompt(20), 10, regex="a", choice=["b"])
        assert two.error is not None


@virtual_time
async def test_a_grammar_with_masks_is_refused_on_grpc() -> None:
    """What would choose against the grammar does not go with it."""
    async with a_mesh() as mesh:
        answer = await mesh.ask(a_prompt(20), 10, regex="a+", allowed_token_ids=pack_u32([9]))
        assert answer.error is not None
        assert answer.error.param == "allowed_token_ids"


@virtual_time
async def test_choices_of_texts() -> None:
    """Each is one of them, whole."""
    words = ["yes", "no", "perhaps, if the weather holds"]
    async with a_mesh() as mesh:
        source = random.Random(4)
        for _ in range(6):
            prompt = a_prompt(20, seed=source.randrange(1000))
            answer = await mesh.ask(prompt, 60, choice=words, temperature=1.0, seed=3)
            assert text_of(answer) in words
