"""OpenAI's own client asks for JSON of a schema and for calls of tools, from the bundled model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.interop.conftest import API_KEY
from tests.support.grammars import needs_library

pytestmark = [needs_library, pytest.mark.process]

ASK: Any = [{"role": "user", "content": "What does the red fox keep?"}]
SHORT: Any = {"max_tokens": 200, "temperature": 0}


class Place(BaseModel):
    """Nested, so that the schema has references."""

    city: str = Field(max_length=12)
    kind: Literal["town", "village"]


class Story(BaseModel):
    """What the client parses answers into."""

    title: str = Field(max_length=16)
    pages: int = Field(ge=1, le=20)
    place: Place
    tags: list[Literal["red", "green"]] = Field(max_length=2)


@pytest.fixture
async def client(running_mesh: tuple[str, str]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=running_mesh[0] + "/v1", api_key=API_KEY, max_retries=0
    ) as made:
        yield made


async def test_parsed_answers(client: AsyncOpenAI, model: str) -> None:
    """The client makes the schema of a model of pydantic's, and an object of the answer."""
    answer = await client.chat.completions.parse(
        model=model, messages=ASK, response_format=Story, **SHORT
    )
    story = answer.choices[0].message.parsed
    assert isinstance(story, Story)
    assert 1 <= story.pages <= 20
    drawn = {**SHORT, "temperature": 1.0, "seed": 3, "n": 3}
    several = await client.chat.completions.parse(
        model=model, messages=ASK, response_format=Story, **drawn
    )
    assert all(isinstance(one.message.parsed, Story) for one in several.choices)


async def test_a_parsed_stream(client: AsyncOpenAI, model: str) -> None:
    """The same answer, piece by piece."""
    whole = await client.chat.completions.parse(
        model=model, messages=ASK, response_format=Story, **SHORT
    )
    async with client.chat.completions.stream(
        model=model, messages=ASK, response_format=Story, **SHORT
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_any_object_and_texts_to_choose_from(client: AsyncOpenAI, model: str) -> None:
    """Spellings of vLLM's and SGLang's that the client sends as extra fields."""
    for more, check in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"guided_choice": ["a", "b"]}, lambda text: text in ("a", "b")),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"guided_json": {"enum": [7, 8]}}, lambda text: text in ("7", "8")),
        ({"ebnf": 'root ::= "x" ("y" | "z")'}, lambda text: text in ("xy", "xz")),
    ):
        answer = await client.chat.completions.create(
            model=model, messages=ASK, extra_body=more, **SHORT
        )
        text = answer.choices[0].message.content
        assert text is not None
        assert check(text), (more, text)


def a_tool(name: str) -> Any:
    return openai.pydantic_function_tool(Story, name=name, description="Keeps a story.")


async def test_calls_that_must_come(client: AsyncOpenAI, model: str) -> None:
    """Required and named, whole and streamed: the arguments parse."""
    tools = [a_tool("keep"), a_tool("send")]
    required: Any = {"tool_choice": "required", "parallel_tool_calls": False, "tools": tools}
    answer = await client.chat.completions.parse(model=model, messages=ASK, **required, **SHORT)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name in ("keep", "send") for call in calls] == [True]
    assert isinstance(calls[0].function.parsed_arguments, Story)
    assert answer.choices[0].finish_reason == "tool_calls"
    named: Any = {"tool_choice": {"type": "function", "function": {"name": "send"}}, "tools": tools}
    whole = await client.chat.completions.create(model=model, messages=ASK, **named, **SHORT)
    (call,) = whole.choices[0].message.tool_calls or []
    arguments, name = "", ""
    stream = await client.chat.completions.create(
        model=model, messages=ASK, stream=True, **named, **SHORT
    )
    async for chunk in stream:
        for part in chunk.choices[0].delta.tool_calls or []:
            name += (part.function and part.function.name) or ""
            arguments += (part.function and part.function.arguments) or ""
    assert (name, arguments) == ("send", call.function.arguments)
    Story.model_validate(json.loads(arguments))
    turn: Any = [
        *ASK,
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "kept"},
    ]
    more = await client.chat.completions.create(model=model, messages=turn, **SHORT)
    assert more.choices[0].finish_reason in ("stop", "length")


async def test_what_is_refused(client: AsyncOpenAI, model: str) -> None:
    """A schema that never ends, a tool named twice: typed errors with their place."""
    endless: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model=model, messages=ASK, response_format=endless, **SHORT
        )
    assert refused.value.param == "response_format.json_schema.schema"
    tools = [a_tool("keep"), a_tool("keep")]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=model, messages=ASK, tools=tools, **SHORT)
    assert refused.value.param == "tools[1].function.name"
