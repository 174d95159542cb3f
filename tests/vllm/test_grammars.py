"""Answers that follow grammars, computed by vLLM: the tokens of our own engine, whatever else is in
a step, and the same text after a worker's death."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections import defaultdict
from typing import Any

import aiohttp
import orjson
import pytest
from tokenizers import Tokenizer

from shared.engine.torch_engine import TorchEngine
from shared.errors import InvalidRequest
from shared.model_folder import BUNDLED
from shared.request import SamplingParams
from shared.step import Guide
from tests.support.engine_driver import Driver, greedy
from tests.support.grammars import a_grammar
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess
from tests.vllm.conftest import EAGER, NUM_BLOCKS, RUNNERS, EngineOf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL = "demo-tools"
NUM_NEW = 12
LETTERS = re.compile("[a-f ]{200}")
TOKENIZER = Tokenizer.from_file(str(BUNDLED[MODEL] / "tokenizer.json"))


def guided(**others: Any) -> SamplingParams:
    """An answer of a few letters that no end cuts short."""
    return greedy(NUM_NEW, grammar=a_grammar(LETTERS.pattern, "regex"), **others)


DRAWN = guided(temperature=1.2, top_p=0.95, seed=4, frequency_penalty=0.3)
KINDS = [
    guided(),
    greedy(NUM_NEW),
    DRAWN,
    greedy(NUM_NEW, temperature=0.8, seed=9),
    guided(logprobs=2, prompt_logprobs=1),
    guided(temperature=1.0, seed=2, logprobs=0),
]
PROMPTS = [
    [random.Random(length).randrange(3, 1300) for _ in range(length)]
    for length in (1, 5, 33, 64, 100, 300)
]


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    """Return one of vLLM's model runners."""
    return request.param


@pytest.fixture(scope="module")
def ours() -> TorchEngine:
    """Our own engine."""
    return TorchEngine.load(BUNDLED[MODEL], dtype="float32", num_blocks=NUM_BLOCKS, num_threads=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_our_engine(ranks: int, engine_of: EngineOf, ours: TorchEngine) -> None:
    """Greedy and drawn, with logprobs and penalties, alone and beside rows that follow nothing."""
    want = [Driver(ours).run_alone(*one) for one in zip(PROMPTS, KINDS, strict=True)]
    theirs = engine_of(MODEL, ranks=ranks)
    alone = [Driver(theirs).run_alone(*one) for one in zip(PROMPTS, KINDS, strict=True)]
    beside = [Driver(theirs, seed).run_mixed(PROMPTS, KINDS, max_chunk=80) for seed in range(2)]
    for found in (alone, *beside):
        assert [one.output for one in found] == [one.output for one in want]
        for one, due in zip(found, want, strict=True):
            for result, known in zip(one.results, due.results, strict=True):
                assert not result.failure
                if known.logprobs is not None:
                    assert result.logprobs is not None
                    assert result.logprobs.logprob == pytest.approx(
                        known.logprobs.logprob, abs=1e-3
                    )
    for one in want:
        is_of_letters = re.fullmatch("[a-f ]+", TOKENIZER.decode(one.output)) is not None
        assert is_of_letters == bool(one.params.grammar)


@pytest.mark.parametrize("params", [guided(), DRAWN], ids=["greedy", "drawn"])
def test_who_continues_says_the_same(
    params: SamplingParams, engine_of: EngineOf, ours: TorchEngine
) -> None:
    """From any token on, on other blocks or on our own engine: the grammar's state is made from the
    tokens."""
    theirs = engine_of(MODEL)
    want = Driver(ours).run_alone(PROMPTS[3], params).output
    for engine in (theirs, ours):
        for num_known in (1, NUM_NEW - 1):
            driver = Driver(engine, seed=num_known)
            moved = driver.start(PROMPTS[3], params)
            moved.output = want[:num_known]
            while not moved.is_done:
                row = moved.row(1 << 30)
                moved.commit(row, engine.step([row])[0])
            assert moved.output == want


def test_a_grammar_that_says_no_more_fails_its_row_alone(engine_of: EngineOf) -> None:
    """The row beside it goes on."""
    engine = engine_of(MODEL)
    driver = Driver(engine)
    want = driver.run_alone(PROMPTS[2], guided()).output
    good, bad = driver.start(PROMPTS[2], guided()), driver.start(PROMPTS[1], guided())
    bad.guide = Guide(bad.params.grammar, TOKENIZER.encode("XYZ").ids)
    bad.output = list(bad.guide.output)
    rows = [bad.row(1 << 30), good.row(1 << 30)]
    failed, went_on = engine.step(rows)
    assert failed.failure
    assert (went_on.token_id, went_on.failure) == (want[0], "")


def test_a_model_without_a_tokenizer_refuses_grammars(engine_of: EngineOf) -> None:
    """Before any work."""
    grammar = guided().grammar
    engine_of(MODEL).call("expect", grammar)
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        engine_of("llama").call("expect", grammar)


WORKER = {"vllm_args": EAGER, "num_blocks": 160, "dtype": "float32", "model": MODEL}
PERSON = {
    "type": "object",
    "properties": {
        "person": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "code": {"type": "string", "pattern": "^[a-f]{90}$"},
    },
    "required": ["person", "age", "code"],
    "additionalProperties": False,
}
"""Of answers that are long enough to be killed amid them."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FUNCTION = {"name": "note_person", "strict": True, "parameters": PERSON}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False}
STRICT_WEATHER = {
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "code": {"type": "string", "pattern": "^b{90}$"},
        },
        "required": ["city", "code"],
        "additionalProperties": False,
    },
}
NAMED = {"type": "function", "function": {"name": "note_person"}}
WEATHER = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": [{"type": "function", "function": STRICT_WEATHER}],
    "tool_choice": "auto",
}
"""What the model calls of itself; that it must name a code holds it to the schema."""
ASKED: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"response_format": FORMAT, "temperature": 0.9, "seed": 3, "n": 2},
    {"response_format": FORMAT, "logprobs": True},
    TOOLS | {"tool_choice": "required"},
    TOOLS | {"tool_choice": NAMED, "temperature": 0.9, "seed": 5},
    WEATHER,
]
NAMES = ["Anna", "Paul", "Maria", "Tom"]


class Told:
    """What a client has heard of one answer. texts: content and arguments by choice."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: list[str] = []
        self.num_attempts = 0

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        assert "error" not in event, event
        self.num_attempts = event.get("receipt", {}).get("attempts", self.num_attempts)
        for choice in event["choices"]:
            said = choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                said += call["function"].get("arguments") or ""
            self.texts[choice["index"]] += said
            for one in (choice.get("logprobs") or {}).get("content") or ():
                self.tokens.append(one["token"])


async def ask_all(mesh: ProcessMesh, gateway: ServiceProcess) -> list[Told]:
    """Each kind four times, all at once."""
    url = f"http://127.0.0.1:{gateway.facts['http_port']}/v1/chat/completions"

    async def ask(session: aiohttp.ClientSession, number: int) -> Told:
        fields = {"temperature": 0, "max_tokens": 300} | ASKED[number % len(ASKED)]
        question = (
            f"The person is {NAMES[number % len(NAMES)]}. The age is {20 + number}. Answer "
            "as JSON with person, age and code."
        )
        body = {"messages": [{"role": "user", "content": question}], **fields}
        told = Told()
        more = {"stream": True, "include_receipt": True}
        async with session.post(url, json=body | more) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    told.take(orjson.loads(line[6:]))
        return told

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(session, number)) for number in range(4 * len(ASKED))]
    return [one.result() for one in asked]


@pytest.mark.process
@pytest.mark.ucx
async def test_answers_and_calls_are_the_same_though_a_worker_dies() -> None:
    """JSON of a schema, drawn twice, with logprobs, calls that must come, and strict ones that the
    model makes of itself."""
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(model=MODEL)
            roles = ("prefill", "decode", "decode")
            workers = [await mesh.start(role, **WORKER) for role in roles]
            await mesh.ready(*workers)
            await mesh.paired(gateway, 2)
            want = await ask_all(mesh, gateway)
            for number, told in enumerate(want):
                is_weather = ASKED[number % len(ASKED)] is WEATHER
                keys = ["city", "code"] if is_weather else PERSON["required"]
                assert all(list(json.loads(text)) == keys for text in told.texts.values())
            victims: list[ServiceProcess] = []

            async def is_amid() -> bool:
                for worker in workers[1:]:
                    if not victims and (await mesh.gauges(worker))["requests_running"] >= 3:
                        victims.append(worker)
                return bool(victims)

            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(ask_all(mesh, gateway))
                await mesh.until(is_amid)
                victims[0].send(signal.SIGKILL)
            found = asked.result()
            assert [one.texts for one in found] == [one.texts for one in want]
            assert [one.tokens for one in found] == [one.tokens for one in want]
            assert max(one.num_attempts for one in found) > 1
            workers.remove(victims[0])
            await mesh.home([gateway], workers)
