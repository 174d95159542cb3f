"""OpenAI's own client and its newer API, /v1/responses: text, events, schemas, tools, and turns
that go on from the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from shared.errors import WorkerLost
from tests.interop.conftest import API_KEY, HttpTarget
from tests.interop.test_openai_structured import Story
from tests.support.grammars import needs_library
from tests.support.scripted_mesh import failing_after

SHORT: Any = {"temperature": 0, "max_output_tokens": 24}
LONG: Any = {"temperature": 0, "max_output_tokens": 200}


def plain(response: Response) -> tuple[str, str | None, int]:
    """What must be the same both ways."""
    assert response.usage is not None
    return response.output_text, response.status, response.usage.output_tokens


async def test_a_response_streamed_is_the_response_whole(client: AsyncOpenAI, model: str) -> None:
    """As raw events, and as the client's own stream puts them together; and as a chat says it."""
    asked: Any = {"model": model, "input": "Tell a story.", "instructions": "Be brief.", **SHORT}
    whole = await client.responses.create(**asked)
    assert whole.model == model
    assert whole.output_text
    chat = await client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tell a story."},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert chat.choices[0].message.content == whole.output_text
    text, last = "", None
    numbers: list[int] = []
    async for event in await client.responses.create(stream=True, **asked):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.incomplete" or event.type == "response.completed":
            last = event.response
    assert numbers == list(range(len(numbers)))
    assert last is not None
    assert plain(last) == plain(whole)
    assert text == whole.output_text
    async with client.responses.stream(**{**asked, "max_output_tokens": 400}) as stream:
        snapshots = [
            event.snapshot async for event in stream if event.type == "response.output_text.delta"
        ]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text


async def test_turns(client: AsyncOpenAI, model: str) -> None:
    """The next turn sends the answer's own items back; an id alone is refused, for none is kept."""
    first = await client.responses.create(model=model, input="What is red?", **SHORT)
    again: Any = [
        {"role": "user", "content": "What is red?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And blue?"},
    ]
    second = await client.responses.create(model=model, input=again, **SHORT)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model=model, input="x", previous_response_id=first.id, **SHORT
        )
    assert refused.value.param == "previous_response_id"
    assert "send all of it as input" in refused.value.message


async def test_what_is_refused(client: AsyncOpenAI, model: str) -> None:
    """What is no part of this API, or not of ours, comes as the client's exceptions."""
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=model, input="x", background=True)
    assert refused.value.param == "background"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=model, input="x", tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0].type"
    orphan: Any = [{"type": "function_call_output", "call_id": "x", "output": "y"}]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=model, input=orphan)
    assert refused.value.param == "input[0].call_id"


async def test_a_stream_that_breaks(http_target: HttpTarget, client: AsyncOpenAI) -> None:
    """The client's last event says what broke it."""
    http_target.scripted().script = failing_after("the", WorkerLost("gone"))
    stream = await client.responses.create(model="tiny", input="x", stream=True)
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "gone"


# --- of the bundled model -------------------------------------------------------------------------


@pytest.fixture
async def up(running_mesh: tuple[str, str]) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=running_mesh[0] + "/v1", api_key=API_KEY, max_retries=0
    ) as made:
        yield made


@needs_library
@pytest.mark.process
async def test_parsed_answers(up: AsyncOpenAI) -> None:
    """The client makes the schema of a model of pydantic's, and an object of the answer, whole and
    streamed."""
    asked: Any = {"model": "demo", "input": "What does the red fox keep?", "text_format": Story}
    whole = await up.responses.parse(**asked, **LONG)
    assert isinstance(whole.output_parsed, Story)
    async with up.responses.stream(**asked, **LONG) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_parsed == whole.output_parsed


@needs_library
@pytest.mark.process
async def test_a_loop_of_tools(up: AsyncOpenAI) -> None:
    """A call that must come, parsed by the client; its result goes back with all that was said."""
    tool: Any = {
        "type": "function",
        "name": "keep",
        "description": "Keeps a story.",
        "parameters": Story.model_json_schema(),
        "strict": False,
    }
    asked: Any = {"model": "demo", "tools": [tool], **LONG}
    question = "What does the red fox keep?"
    first = await up.responses.create(
        input=question, tool_choice={"type": "function", "name": "keep"}, **asked
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    Story.model_validate_json(call.arguments)
    arguments = ""
    stream = await up.responses.create(input=question, tool_choice="required", stream=True, **asked)
    async for event in stream:
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        if event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments
    Story.model_validate_json(arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "kept"}
    short: Any = {**asked, "tool_choice": "none", "max_output_tokens": 24}
    turns: Any = [{"role": "user", "content": question}, *first.output, result]
    second = await up.responses.create(input=turns, **short)
    assert second.status in ("completed", "incomplete")
