"""gpt-oss over HTTP: channels are special tokens, and come apart as thinking, text and calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tokenizers import AddedToken, Tokenizer

from services.gateway.text.calls.harmony import call_header
from services.gateway.text.grammars import Grammars
from services.gateway.text.text_model import TextModel
from shared.grammar import library, matcher
from tests.support.grammars import check_in_place, needs_library
from tests.support.http_client import HI, Client
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_template, tiny_tokenizer

SPECIAL = ("start", "channel", "message", "constrain", "end", "call", "return")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{% if message.thinking and not message.content %}"
    "<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS, START = "<|channel|>analysis<|message|>", "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CITY = {"type": "object", "properties": {"city": {"maxLength": 8, "type": "string"}}}
CITY = {**CITY, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = call_header("weather") + '{"city": "Paris"}'
THOUGHT = f"{ANALYSIS}User asks.<|end|>{START}"


def tokenizer() -> Tokenizer:
    one = tiny_tokenizer()
    one.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    return one


@asynccontextmanager
async def gateway(answer: str, **settings: Any) -> AsyncGenerator[tuple[Client, ScriptedMesh]]:
    mesh = ScriptedMesh(saying(answer, tokenizer=tokenizer()))
    text = TextModel(tokenizer(), tiny_template(TEMPLATE), grammars=Grammars(check_in_place))
    async with (
        http_gateway(mesh, text=text, **settings) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Client(url, session), mesh


def takes(grammar: str, answer: str) -> bool:
    """Whether it is a whole answer."""
    own = tokenizer()
    read = library().LLTokenizer(own.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    state = matcher(read, grammar)
    ids = own.encode(answer, add_special_tokens=False).ids
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


async def chat(client: Client, **fields: Any) -> Any:
    """The one choice, with its usage; the same as streamed."""
    body = {"messages": HI, **fields}
    answer = await client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    *chunks, _ = await client.events("/v1/chat/completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    for key in ("content", "reasoning_content"):
        told = "".join(part["delta"].get(key) or "" for part in parts)
        assert told == (choice["message"].get(key) or "")
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    return choice, answer["usage"]


async def test_channels_come_apart() -> None:
    """Thinking with its number of tokens, and what is for the reader; nothing of the marks."""
    async with gateway(f"{THOUGHT}{FINAL}Fine.") as (client, _):
        choice, usage = await chat(client)
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("User asks.", "Fine.")
        own = tokenizer().encode("User asks.", add_special_tokens=False)
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted == len(own.ids) + len(("<|message|>", "<|end|>"))
        choice, _ = await chat(client, separate_reasoning=False)
        assert choice["message"]["content"] == f"{ANALYSIS}User asks.<|end|>Fine."
        body = await client.post("/v1/responses", {"input": "hi"})
        assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
        assert body["output"][1]["content"][0]["text"] == "Fine."
        body = await client.post("/v1/messages", {"messages": HI, "max_tokens": 200})
        assert body["content"][-1]["text"] == "Fine."


async def test_a_call_in_a_channel() -> None:
    """After thinking; without tools it is text as it was written."""
    async with gateway(f"{THOUGHT}{CALL}") as (client, _):
        choice, _ = await chat(client, tools=[WEATHER])
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        choice, _ = await chat(client)
        assert (choice["message"]["content"], choice["finish_reason"]) == (START + CALL, "stop")
    async with gateway(f"{THOUGHT}{CALL[:-4]}") as (client, _):
        choice, _ = await chat(client, tools=[WEATHER])
        assert choice["finish_reason"] == "stop", "nobody shall run half a call"


@needs_library
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, [CALL], [f"{FINAL}Fine.", call_header("weather") + "{}"]),
        ({"tool_choice": NAMED}, [CALL], [f"{FINAL}Fine.", '{"city": "Paris"}']),
        ({"tools": [STRICT]}, [CALL, f"{FINAL}Fine."], [call_header("weather") + "{}"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
            [call_header("weather") + "{}", FINAL + '{"city": "x"}'],
            [f"{FINAL}Fine.", '{"city": "x"}'],
        ),
        (
            {"tools": None, "response_format": {"type": "json_object"}},
            [f"{FINAL}{{}}"],
            [f"{FINAL}Fine.", CALL],
        ),
        ({"tools": None, "guided_regex": "[ab]+"}, [f"{FINAL}ab"], [f"{FINAL}c", "ab"]),
    ],
    ids=["required", "named", "strict", "format", "object", "regex"],
)
async def test_what_must_come_comes_in_its_channel(
    fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Whether it thinks before or not, by tokens that no text can spell."""
    async with gateway(good[0]) as (client, mesh):
        await chat(client, **({"tools": [WEATHER]} | fields))
        grammar = mesh.requests[-1].sampling.grammar
    assert grammar
    for answer in good:
        assert takes(grammar, answer)
        assert takes(grammar, THOUGHT + answer)
    for answer in bad:
        assert not takes(grammar, answer)
        assert not takes(grammar, THOUGHT + answer)


async def test_earlier_thinking_has_the_name_that_the_template_knows() -> None:
    """gpt-oss takes no text beside it in a message that calls."""
    function = {"name": "weather", "arguments": "{}"}
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    async with gateway(f"{FINAL}Wet.") as (client, mesh):
        await client.post("/v1/chat/completions", {"messages": messages})
        prompt = tokenizer().decode(list(mesh.requests[-1].token_ids), skip_special_tokens=False)
    assert f"{ANALYSIS}Hm.<|end|>\nrain" in prompt


async def test_an_answer_that_continues_a_text() -> None:
    """Has no channel: the message before it has one."""
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    async with gateway(" fine: to=<") as (client, _):
        choice, _ = await chat(
            client, messages=messages, continue_final_message=True, add_generation_prompt=False
        )
    assert choice["message"]["content"] == " fine: to=<"


async def test_marks_of_thinking_that_are_special_tokens() -> None:
    """As Magistral's: shown to the parser, and to nobody else."""
    own = tiny_tokenizer()
    own.add_special_tokens([AddedToken(name, special=True) for name in ("[THINK]", "[/THINK]")])
    mesh = ScriptedMesh(saying("[THINK]Hm.[/THINK]ab", tokenizer=own))
    template = tiny_template("[THINK]{{ messages[0].content }}|")
    text = TextModel(own, template, grammars=Grammars(check_in_place))
    async with http_gateway(mesh, text=text) as url, aiohttp.ClientSession() as session:
        choice, _ = await chat(Client(url, session), guided_regex="[ab]+")
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "ab")
    read = library().LLTokenizer(own.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    for answer, is_good in (("[THINK]Hm.[/THINK]ab", True), ("[THINK]Hm.", False)):
        state = matcher(read, mesh.requests[-1].sampling.grammar)
        ids = own.encode(answer, add_special_tokens=False).ids
        assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) == is_good
