"""Frameworks for agents and for structured answers against `pdmesh up` with the bundled model that
calls tools: what each makes of a class, and a tool that it runs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.interop.conftest import pdmesh_up
from tests.support.client_environments import PINS
from tests.support.foreign_client import run_client_well
from tests.support.grammars import needs_library
from tools.demo_model import tool_data

pytestmark = [needs_library, pytest.mark.process, pytest.mark.timeout(900)]

RUNS_WITHIN_S = 240.0
TOLD = (
    "The person is Anna. The age is 31. The city is Rome. Answer as JSON with person, age and city."
)
TRUTH = {"person": "Anna", "age": 31, "city": "Rome"}
QUESTION = "What is the weather in Rome?"
FINAL = "The weather in Rome is sunny."
CASES = 12
CALL = ["get_weather", {"city": "Rome"}]


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    """A mesh with the model that calls tools."""
    with pdmesh_up("--model", "demo-tools") as (url, _):
        yield url


@pytest.fixture
def run(
    client_bin: Callable[[str], Path], tools_url: str, tmp_path: Path
) -> Callable[[str, str], Any]:
    """Run one client's program; gives what it printed."""

    async def run(environment: str, program: str) -> dict[str, Any]:
        task = tmp_path / "task.json"
        asked = {"url": tools_url, "model": "demo-tools", "told": TOLD, "question": QUESTION}
        asked["stop"] = TRUTH["city"]
        task.write_text(json.dumps(asked))
        words = await run_client_well(
            *(client_bin(environment) / "python", PINS / program, task),
            cwd=tmp_path,
            within_s=RUNS_WITHIN_S,
            environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        return json.loads(words.splitlines()[-1])

    return run


def require_people(got: dict[str, Any], *ways: str) -> None:
    """Every way gave the class's fields, each of its type; most gave what the text says."""
    structured: dict[str, Any] = got["structured"]
    assert set(structured) == set(ways)
    for person in structured.values():
        assert list(person) == list(TRUTH)
        assert [type(value) for value in person.values()] == [str, int, str]
    right = [way for way, person in structured.items() if person == TRUTH]
    assert len(right) > len(ways) / 2, structured


async def test_instructor(run: Callable[[str, str], Any]) -> None:
    """Calls of tools, JSON with the schema in the prompt, a JSON schema, and a stream of parts."""
    got = await run("instructor", "instructor_client.py")
    require_people(got, "TOOLS", "JSON", "JSON_SCHEMA", "partial")


async def test_pydantic_ai(run: Callable[[str, str], Any]) -> None:
    """An agent runs its tool and answers with what it gave, whole and streamed; typed answers."""
    got = await run("pydantic-ai", "pydantic_ai_client.py")
    require_people(got, "ToolOutput", "NativeOutput")
    assert got["called"] == ["Rome", "Rome"], got
    assert got["final"] == got["streamed"] == FINAL


@pytest.mark.nightly  # the way of pydantic-ai and instructor
async def test_llama_index(run: Callable[[str, str], Any]) -> None:
    """An agent runs its tool; typed answers by a call and by a schema."""
    got = await run("llama-index", "llama_index_client.py")
    require_people(got, "tool", "json_schema")
    assert got["selected"] == CALL
    assert got["called"] == ["Rome"]
    assert got["final"] == FINAL


async def test_openai_agents(run: Callable[[str, str], Any]) -> None:
    """An agent runs its tool over /v1/responses, whole and streamed, also where its answer shall
    have a type; a typed answer."""
    got = await run("openai-agents", "openai_agents_client.py")
    require_people(got, "output_type")
    assert got["called"] == ["Rome", "Rome", "Rome"], got
    assert got["final"] == got["streamed"] == FINAL


async def test_anthropic(run: Callable[[str, str], Any], tools_url: str) -> None:
    """Messages whole and streamed are equal and say what a chat says; calls, a tool that runs, a
    typed answer, counted tokens."""
    got = await run("anthropic", "anthropic_client.py")
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TOLD}],
        "temperature": 0,
        "max_tokens": 200,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{tools_url}/v1/chat/completions", json=chat) as response,
    ):
        body = await response.json()
    assert got["text"] == body["choices"][0]["message"]["content"]
    assert got["ends"] == ["end_turn", "max_tokens", "stop_sequence", "Rome"]
    assert got["calls"] == [CALL] * 6
    assert got["none"] == "end_turn"
    assert got["called"] == ["Rome"]
    assert got["final"] == FINAL
    require_people(got, "parse")


@pytest.mark.parametrize(
    ("environment", "ways"),
    [
        ("langchain", ("json_schema", "function_calling", "json_mode")),
        pytest.param("litellm", ("class", "json_schema"), marks=pytest.mark.nightly),
    ],
)
async def test_calls_and_schemas(
    run: Callable[[str, str], Any], environment: str, ways: tuple[str, ...]
) -> None:
    """`with_structured_output`, `bind_tools` and what is like them: calls whole, streamed and
    forced, and the answer after the tool's."""
    got = await run(environment, f"{environment}_tools_client.py")
    require_people(got, *ways)
    assert got["called"] == ["Rome"]
    assert got["streamed_calls"] == [CALL]
    assert set(got["named_calls"]) == {"get_weather"}  # "required" may bring several
    assert got["final"] == FINAL


async def told(url: str, question: str, **more: Any) -> Any:
    """The choice of a greedy answer."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 200}) as response,
    ):
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
        return choice


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Of an answer that was not cut off."""
    if choice["finish_reason"] == "length":
        return []
    calls = [one["function"] for one in choice["message"].get("tool_calls") or []]
    return [(one["name"], json.loads(one["arguments"])) for one in calls]


def offered(made: tool_data.Made) -> dict[str, Any]:
    shown = {name: {"type": kind} for name, kind in made.shown.items()}
    parameters = {"type": "object", "properties": shown, "required": list(shown)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": made.name, "parameters": parameters}}


async def test_calls_of_our_own_making(tools_url: str) -> None:
    """The categories of the Berkeley leaderboard that are of one turn: right more often than not as
    the model likes, and of its schema always where a call must come."""
    rng = random.Random("calls of our own making")
    right: dict[str, list[bool]] = defaultdict(list)
    for _ in range(CASES):
        known = [tool_data.known_tool(rng, one) for one in rng.sample(tool_data.KNOWN_TOOLS, 3)]
        made_up = tool_data.any_tool(rng)
        for kind, tools in (("simple", known[:1]), ("multiple", known), ("made up", [made_up])):
            wanted, shown = tools[0], [offered(one) for one in rng.sample(tools, len(tools))]
            free = await told(tools_url, wanted.question, tools=shown)
            right[kind].append(calls_of(free) == [(wanted.name, wanted.arguments)])
            must = await told(
                tools_url,
                wanted.question,
                tools=shown,
                tool_choice="required",
                parallel_tool_calls=False,
            )
            by_name = {one["function"]["name"]: one["function"]["parameters"] for one in shown}
            for name, arguments in calls_of(must):
                jsonschema.validate(arguments, by_name[name])
            right[f"{kind}, required"].append(len(calls_of(must)) == 1)
        question = tool_data.plain_turn(rng)[0]
        free = await told(tools_url, question, tools=[offered(one) for one in known])
        right["irrelevance"].append(not calls_of(free))
    assert all(sum(each) > CASES / 2 for each in right.values()), right


async def test_schemas_of_our_own_making(tools_url: str) -> None:
    """Filled right more often than not without a grammar, and always valid with one."""
    rng = random.Random("schemas of our own making")
    right: list[bool] = []
    for _ in range(CASES):
        text, schema, value = tool_data.schema_case(rng)
        question = f"{text} {tool_data.asked_schema(rng, schema)}"
        right.append((await told(tools_url, question))["message"]["content"] == json.dumps(value))
        schema["additionalProperties"] = False
        guided = await told(tools_url, question, guided_json=schema)
        if guided["finish_reason"] == "stop":
            jsonschema.validate(json.loads(guided["message"]["content"]), schema)
    assert sum(right) > CASES / 2, right
