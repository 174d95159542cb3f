"""What an application does with langchain-openai's tools and structured output. Reads its task
(JSON) from a file, prints what it got as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

task = json.loads(Path(sys.argv[1]).read_text())
chat = ChatOpenAI(
    model=task["model"],
    base_url=task["url"] + "/v1",
    api_key="none",
    max_retries=0,
    temperature=0,
    max_tokens=200,
)


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    got: dict[str, Any] = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        typed = chat.with_structured_output(Person, method=method)
        got[method] = typed.invoke(task["told"]).model_dump()
    bound = chat.bind_tools([get_weather])
    asked: list[Any] = [HumanMessage(task["question"])]
    answer = bound.invoke(asked)
    streamed = None
    for chunk in bound.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    named = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(asked)
    asked.append(answer)
    asked += [
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        for call in answer.tool_calls
    ]
    return {
        "structured": got,
        "called": [call["args"].get("city") for call in answer.tool_calls],
        "streamed_calls": [[call["name"], call["args"]] for call in streamed.tool_calls],
        "named_calls": [call["name"] for call in named.tool_calls],
        "final": bound.invoke(asked).text,
    }


print(json.dumps(main()))
