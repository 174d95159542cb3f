"""Requests of all kinds, each by its number: chat, completions, JSON by a schema, tools, logprobs,
stops, penalties, several choices; with prompts that begin alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp

from tests.support.grammars import PERSON

AT_ONCE = 10
ANSWERED_WITHIN_S = 120.0

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


def told(body: dict[str, Any]) -> Any:
    """Return what of an answer may not differ: all but names, times and what was cached."""
    usage = body["usage"]
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]
    return body["choices"], usage["prompt_tokens"], usage["completion_tokens"]


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> Any:
    """Ask and return what may not differ; a refusal is an error."""
    request = a_request(number)
    async with session.post(url + request.path, json=request.body) as response:
        body = await response.json()
        assert response.status == 200, body
        return told(body)


async def ask_all(url: str, numbers: Iterator[int], told_of: dict[int, list[Any]]) -> None:
    """Ask for these, some at once."""
    limit = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
    async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as tasks:

        async def some() -> None:
            for number in numbers:
                told_of.setdefault(number, []).append(await ask(session, url, number))

        for _ in range(AT_ONCE):
            tasks.create_task(some())
