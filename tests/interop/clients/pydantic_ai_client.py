"""What an application does with pydantic-ai: an agent with a tool, and answers of a class. Reads
its task (JSON) from a file, prints what it got as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

task = json.loads(Path(sys.argv[1]).read_text())
model = OpenAIChatModel(
    task["model"], provider=OpenAIProvider(base_url=task["url"] + "/v1", api_key="none")
)
SETTINGS: Any = {"temperature": 0, "max_tokens": 200}
called: list[str] = []


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


async def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    agent = Agent(model, tools=[get_weather], retries=0, model_settings=SETTINGS)
    final = (await agent.run(task["question"])).output
    async with agent.run_stream(task["question"]) as stream:
        streamed = await stream.get_output()
    got: dict[str, Any] = {}
    for way in (ToolOutput, NativeOutput):
        typed: Any = Agent(model, output_type=way(Person), retries=0, model_settings=SETTINGS)
        got[way.__name__] = (await typed.run(task["told"])).output.model_dump()
    return {"structured": got, "called": called, "final": final, "streamed": streamed}


print(json.dumps(asyncio.run(main())))
