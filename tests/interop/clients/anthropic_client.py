"""What an application does with Anthropic's client: answers whole and streamed, a tool that runs,
an object of a class of its own. Reads its task (JSON) from a file, prints what it got as one line
of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

task = json.loads(Path(sys.argv[1]).read_text())
client = Anthropic(base_url=task["url"], api_key="none", max_retries=0)
ASKED: Any = {"model": task["model"], "max_tokens": 200, "extra_body": {"temperature": 0}}
QUESTION: Any = [{"role": "user", "content": task["question"]}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
called: list[str] = []


class Person(BaseModel):
    """What is asked for."""

    person: str
    age: int
    city: str


@beta_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


def shown(message: Any) -> Any:
    """What must be the same whole and streamed, without the ids of calls."""
    told = message.model_dump(include={"content", "stop_reason", "stop_sequence", "usage"})
    told["usage"].pop("cache_read_input_tokens")  # the second time the prompt is cached
    told["usage"].pop("input_tokens")
    for block in told["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
        block.pop("__json_buf", None)
    return told


def both_ways(**fields: Any) -> Any:
    """A message whole, which must be the message that a stream adds up to."""
    whole = client.messages.create(**ASKED | fields)
    with client.messages.stream(**ASKED | fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_message()
    assert shown(streamed) == shown(whole), (streamed, whole)
    return whole


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    got: dict[str, Any] = {}
    story = {"messages": [{"role": "user", "content": task["told"]}]}
    text = both_ways(**story, system=[{"type": "text", "text": "Be brief."}])
    got["text"] = text.content[0].text
    prompt = client.messages.count_tokens(
        model=task["model"], **story, system="Be brief."
    ).input_tokens
    used = text.usage
    assert prompt == used.input_tokens + used.cache_read_input_tokens, (prompt, used)
    cut = both_ways(**story, max_tokens=3)
    stopped = both_ways(**story, stop_sequences=[task["stop"]])
    got["ends"] = [text.stop_reason, cut.stop_reason, stopped.stop_reason, stopped.stop_sequence]
    tools: Any = {"messages": QUESTION, "tools": [WEATHER]}
    calls: list[Any] = []
    for choice in ({"type": "auto"}, ANY, {"type": "tool", "name": "get_weather"}):
        for strict in (False, True):
            message = both_ways(
                **{**tools, "tools": [{**WEATHER, "strict": strict}]}, tool_choice=choice
            )
            assert message.stop_reason == "tool_use"
            calls.append(next([block.name, block.input] for block in message.content))
    got["calls"] = calls
    none = both_ways(**tools, tool_choice={"type": "none"})
    got["none"] = none.stop_reason
    runner = client.beta.messages.tool_runner(**ASKED, messages=QUESTION, tools=[get_weather])
    got["final"] = runner.until_done().content[0].text
    got["called"] = called
    parsed = client.messages.parse(**ASKED, **story, output_format=Person)
    got["structured"] = {"parse": parsed.parsed_output.model_dump()}
    return got


print(json.dumps(main()))
