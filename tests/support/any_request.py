"""Requests of all kinds, each by its number: chat, completions, JSON by a schema, tools, logprobs,
stops, penalties, several choices; with prompts that begin alike."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.support.grammars import PERSON

WORDS = ("stream", "token", "cache", "worker", "river", "green", "seven", "fox", "12", "code")
LENGTHS = (60, 200, 400, 700)
"""Words of the system prompts, with which prompts begin alike."""

PARAMETERS = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


class Request(NamedTuple):
    """One request."""

    path: str
    body: dict[str, Any]


def a_request(number: int) -> Request:
    """Return one of them, by its number."""
    chance = random.Random(number)

    def words(num: int, source: random.Random = chance) -> str:
        return " ".join(source.choice(WORDS) for _ in range(num))

    length = chance.choice(LENGTHS)
    system, question = words(length, random.Random(length)), words(chance.randrange(3, 40))
    body: dict[str, Any] = {
        "max_tokens": chance.choice([1, 2, 8, 24, 60]),
        "temperature": chance.choice([0.0, 0.0, 0.9]),
        "seed": number,
    }
    if chance.random() < 0.2:
        body["n"] = 2
    if chance.random() < 0.2:
        body["frequency_penalty"] = 0.5
    match chance.choice(["completion", "chat", "chat", "turn", "json", "tool"]):
        case "completion":
            logprobs = chance.choice([None, 1])
            return Request(
                "/v1/completions", body | {"prompt": f"{system} {question}", "logprobs": logprobs}
            )
        case "json":
            body |= {"response_format": FORMAT, "max_tokens": 120}
        case "tool":
            body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
        case "turn":
            turns = [("assistant", words(20)), ("user", words(8))]
            body["messages"] = [{"role": role, "content": text} for role, text in turns]
        case _:
            body |= {"logprobs": True, "top_logprobs": 2, "stop": [" the"]}
    first = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Request("/v1/chat/completions", body | {"messages": first + body.get("messages", [])})
