"""What an application does with litellm's tools and response_format. Reads its task (JSON) from a
file, prints what it got as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import litellm
from pydantic import BaseModel, Field

task = json.loads(Path(sys.argv[1]).read_text())
settings: dict[str, Any] = {
    "model": "openai/" + task["model"],
    "api_base": task["url"] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 200,
    "num_retries": 0,
}


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    told: Any = [{"role": "user", "content": task["told"]}]
    got: dict[str, Any] = {}
    answer = litellm.completion(messages=told, response_format=Person, **settings)
    got["class"] = Person.model_validate_json(answer.choices[0].message.content).model_dump()
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
    }
    answer = litellm.completion(messages=told, response_format=schema, **settings)
    got["json_schema"] = json.loads(answer.choices[0].message.content)
    asked: Any = [{"role": "user", "content": task["question"]}]
    ask: dict[str, Any] = {"messages": asked, "tools": [TOOL], **settings}
    message = litellm.completion(**ask).choices[0].message
    calls = message.tool_calls or []
    chunks = list(litellm.completion(**ask, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls or []
    forced = litellm.completion(**ask, tool_choice="required").choices[0].message.tool_calls
    asked.append(message.model_dump(exclude_none=True))
    for call in calls:
        asked.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    return {
        "structured": got,
        "called": [json.loads(call.function.arguments).get("city") for call in calls],
        "streamed_calls": [
            [call.function.name, json.loads(call.function.arguments)] for call in streamed
        ],
        "named_calls": [call.function.name for call in forced],
        "final": litellm.completion(**ask).choices[0].message.content,
    }


print(json.dumps(main()))
