"""Frameworks for agents and for structured answers against `pdmesh up` with the bundled model that
calls tools: what each makes of a class, and a tool that it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.interop.conftest import pdmesh_up
from tests.support.client_environments import PINS
from tests.support.foreign_client import run_client_well
from tests.support.grammars import needs_library

pytestmark = [needs_library, pytest.mark.process, pytest.mark.timeout(900)]

RUNS_WITHIN_S = 240.0
TOLD = (
    "The person is Anna. The age is 31. The city is Rome. Answer as JSON with person, age and city."
)
TRUTH = {"person": "Anna", "age": 31, "city": "Rome"}
QUESTION = "What is the weather in Rome?"
FINAL = "The weather in Rome is sunny."
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


async def test_llama_index(run: Callable[[str, str], Any]) -> None:
    """An agent runs its tool; typed answers by a call and by a schema."""
    got = await run("llama-index", "llama_index_client.py")
    require_people(got, "tool", "json_schema")
    assert got["selected"] == CALL
    assert got["called"] == ["Rome"]
    assert got["final"] == FINAL


async def test_openai_agents(run: Callable[[str, str], Any]) -> None:
    """An agent runs its tool over /v1/responses, whole and streamed; a typed answer."""
    got = await run("openai-agents", "openai_agents_client.py")
    require_people(got, "output_type")
    assert got["called"] == ["Rome", "Rome"], got
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
