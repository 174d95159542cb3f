"""What an application does with OpenAI's agents, over /v1/responses: an agent with a tool, and an
answer of a class. Reads its task (JSON) from a file, prints what it got as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

task = json.loads(Path(sys.argv[1]).read_text())
set_tracing_disabled(True)
model = OpenAIResponsesModel(
    task["model"], AsyncOpenAI(base_url=task["url"] + "/v1", api_key="none", max_retries=0)
)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
called: list[str] = []


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


async def main() -> dict[str, Any]:
    """Run agents to their end."""
    agent = Agent(name="a", model=model, tools=[get_weather], model_settings=SETTINGS)
    final = (await Runner.run(agent, task["question"])).final_output
    stream = Runner.run_streamed(agent, task["question"])
    async for _ in stream.stream_events():
        pass
    typed = Agent(name="b", model=model, output_type=Person, model_settings=SETTINGS)
    person = (await Runner.run(typed, task["told"])).final_output
    both = Agent(
        name="c", model=model, tools=[get_weather], output_type=Person, model_settings=SETTINGS
    )
    # The bundled model calls again where it may not tell its answer as text.
    with suppress(MaxTurnsExceeded):
        await Runner.run(both, task["question"], max_turns=1)
    return {
        "called": called,
        "final": final,
        "streamed": stream.final_output,
        "structured": {"output_type": person.model_dump()},
    }


print(json.dumps(asyncio.run(main())))
