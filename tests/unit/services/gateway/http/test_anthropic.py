"""/v1/messages: what becomes of its messages, and what comes back, whole and as events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.http.anthropic_forms import MESSAGES_UNSERVED
from shared.errors import Overloaded, TooLarge, WorkerLost
from tests.support.grammars import needs_library
from tests.support.http_client import parse_named_events
from tests.support.scripted_mesh import failing_after, saying
from tests.unit.services.gateway.http.test_tools import CALL, CLOCK, WEATHER, Gateway, gateway

PATH = "/v1/messages"
TOOLS: list[dict[str, Any]] = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in (WEATHER, CLOCK)
]
ASK: dict[str, Any] = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "A"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sun"}


class MessagesAsker:
    """A client of the route."""

    def __init__(self, here: Gateway) -> None:
        self.here = here
        self.url = here.url.removesuffix("/v1/chat/completions") + PATH

    async def ask(self, path: str = "", headers: Any = None, **fields: Any) -> tuple[int, Any]:
        body = {"messages": [ASK], "max_tokens": 400, **fields}
        async with self.here.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, **fields: Any) -> list[Any]:
        body = {"messages": [ASK], "max_tokens": 400, "stream": True, **fields}
        async with self.here.session.post(self.url, json=body) as response:
            assert response.status == 200
            return parse_named_events(await response.read())


def put_together(events: list[Any]) -> Any:
    """The whole answer that events add up to, as clients of this protocol do it."""
    message = events[0]["message"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    for event in events[1:-1]:
        blocks = message["content"]
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                name = {"input_json_delta": "partial_json"}.get(
                    delta["type"], delta["type"].removesuffix("_delta")
                )
                block["json" if name == "partial_json" else name] += delta[name]
            case "content_block_stop":
                text = blocks[event["index"]].pop("json")
                if text:
                    blocks[event["index"]]["input"] = json.loads(text)
            case _:
                assert event["type"] == "message_delta"
                message |= event["delta"] | {"usage": event["usage"]}
    return message


THINKS = f"<think>so so</think>I look. {CALL}\n{CALL}"


async def test_an_answer_whole_and_as_events() -> None:
    """Thinking, text and two calls are four blocks; the events of a stream add up to them."""
    async with gateway(THINKS, reasoning_parser="think") as here:
        status, whole = await MessagesAsker(here).ask(tools=TOOLS)
        events = await MessagesAsker(here).stream(tools=TOOLS)
    assert status == 200, whole
    streamed = put_together(events)
    thinking, text, *calls = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "so so", "signature": ""}
    assert text == {"type": "text", "text": "I look. "}
    for call in calls:
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"] == {"city": "Paris"}
    assert calls[0]["id"] != calls[1]["id"]
    assert whole["stop_reason"] == "tool_use"
    assert (whole["type"], whole["role"], whole["id"][:4]) == ("message", "assistant", "msg_")
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
        here.mesh.requests[0].token_ids
    )
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    begun = events[0]["message"]["usage"]
    assert begun["input_tokens"] == usage["input_tokens"]
    ids = [whole.pop("id"), streamed.pop("id"), *(call.pop("id") for call in calls)]
    ids += [call.pop("id") for call in streamed["content"][2:]]
    assert len(set(ids)) == len(ids)
    assert streamed == whole


@pytest.mark.parametrize(
    ("answer", "fields", "reason", "sequence"),
    [
        ("hello", {}, "end_turn", None),
        ("a long story", {"max_tokens": 3}, "max_tokens", None),
        ("hello and the end", {"stop_sequences": ["x", "and"]}, "stop_sequence", "and"),
        (CALL, {"tools": TOOLS}, "tool_use", None),
        (CALL, {"tools": TOOLS, "max_tokens": 55}, "max_tokens", None),
        (CALL, {"tools": TOOLS, "stop_sequences": ["aris"]}, "stop_sequence", "aris"),
    ],
)
async def test_why_an_answer_ends(
    answer: str, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """Whole and streamed; a call that is cut off is none of a whole answer."""
    async with gateway(answer) as here:
        _, whole = await MessagesAsker(here).ask(**fields)
        events = await MessagesAsker(here).stream(**fields)
    for told in (whole, events[-2]["delta"]):
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    if answer == CALL:
        assert len(whole["content"]) == (reason == "tool_use")


@pytest.mark.parametrize(("is_alone", "reason"), [(True, "end_turn"), (False, "tool_use")])
async def test_a_call_that_nobody_can_run_ends_no_answer(is_alone: bool, reason: str) -> None:
    """Its arguments are no JSON: a whole answer has no such block, and neither that nor a stream
    says that there is something to run."""
    broken = CALL.replace('"Paris"', "Paris")
    async with gateway(broken if is_alone else broken + CALL) as here:
        _, whole = await MessagesAsker(here).ask(tools=TOOLS)
        events = await MessagesAsker(here).stream(tools=TOOLS)
    assert (len(whole["content"]), whole["stop_reason"]) == (0 if is_alone else 1, reason)
    assert events[-2]["delta"]["stop_reason"] == reason


async def test_messages_become_those_of_a_chat() -> None:
    """System, blocks, thinking, calls, results; what one answer said is one message."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "how"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                USE,
                {**USE, "id": "t2", "input": {"city": "B"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}},
                {**RESULT, "tool_use_id": "t2", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and"},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    async with gateway("x") as here:
        for system in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
            status, body = await MessagesAsker(here).ask(messages=messages, system=system)
            assert status == 200, body
            assert here.prompt == (
                "system::Be kind.\nuser::how\n"
                "assistant:hm:I look.weather(A)weather(B)\ntool::sunt1\ntool::raint2\n"
                "user::and\nnow?\n"
            )


async def test_thinking_that_nobody_can_read_is_no_turn() -> None:
    """An answer that was cut within it leaves no empty message."""
    cut = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    async with gateway("x") as here:
        await MessagesAsker(here).ask(messages=[ASK, cut, ASK])
        assert here.prompt == "user::hi\nuser::hi\n"
        status, body = await MessagesAsker(here).ask(messages=[cut])
        assert (status, body["error"]["param"]) == (400, "messages")


async def test_an_answer_that_is_begun_goes_on() -> None:
    """The last message of an answer is continued, unless it calls."""
    async with gateway("x") as here:
        await MessagesAsker(here).ask(messages=[ASK, {"role": "assistant", "content": "I say "}])
        assert here.prompt == "user::hi\nassistant::I say "
        await MessagesAsker(here).ask(messages=[ASK, {"role": "assistant", "content": [USE]}])
        assert here.prompt == "user::hi\nassistant::weather(A)\n"


async def test_thinking_is_the_templates_to_switch() -> None:
    """enabled and adaptive ask for it, disabled for none; else it is as the model does it."""
    template = "said {{ enable_thinking }}{{ reasoning_effort }}{# <think> #}"
    async with gateway("x", template=template) as here:
        for fields, due in (
            ({}, ""),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True"),
            ({"thinking": {"type": "adaptive"}}, "True"),
            ({"thinking": {"type": "disabled"}}, "False"),
            ({"output_config": {"effort": "low"}}, "Truelow"),
            ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "Falselow"),
        ):
            status, body = await MessagesAsker(here).ask(**fields)
            assert status == 200, body
            assert here.prompt == f"said {due}"


@needs_library
async def test_calls_that_must_come() -> None:
    """any and by name, by a grammar; none shows the template no tool."""
    async with gateway('{"a": 1}') as here:
        ask = MessagesAsker(here).ask
        _, body = await ask(tools=TOOLS, tool_choice={"type": "tool", "name": "clock"})
        (call,) = body["content"]
        assert (call["name"], call["input"], body["stop_reason"]) == ("clock", {"a": 1}, "tool_use")
        await ask(tools=TOOLS, tool_choice={"type": "none"})
        assert "<tool_call>" not in here.prompt
    choice = {"type": "any", "disable_parallel_tool_use": True}
    async with gateway('[{"name": "clock", "parameters": {"b": 2}}]') as here:
        _, body = await MessagesAsker(here).ask(tools=TOOLS, tool_choice=choice)
        assert [block["input"] for block in body["content"]] == [{"b": 2}]
        assert '"maxItems":1' in here.mesh.requests[-1].sampling.grammar


@needs_library
async def test_text_that_must_match_a_schema() -> None:
    """output_config.format; what is wrong with it is told by its own name."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with gateway('{"a": 1}') as here:
        asked = {"format": {"type": "json_schema", "schema": schema}}
        status, body = await MessagesAsker(here).ask(output_config=asked)
        assert (status, body["content"][0]["text"]) == (200, '{"a": 1}')
        assert here.mesh.requests[-1].sampling.grammar
        asked = {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}
        status, body = await MessagesAsker(here).ask(output_config=asked)
    assert (status, body["error"]["param"]) == (400, "output_config.format.schema")


async def test_tokens_are_counted_without_an_answer() -> None:
    """As many as the answer's usage tells; max_tokens need not be there."""
    async with gateway("x") as here:
        _, body = await MessagesAsker(here).ask(tools=TOOLS, system="a b c")
        usage = body["usage"]
        asked = {"messages": [ASK], "tools": TOOLS, "system": "a b c", "max_tokens": None}
        status, counted = await MessagesAsker(here).ask("/count_tokens", **asked)
        assert status == 200
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        assert len(here.mesh.requests) == 1
        # Who counts more than the context holds wants to know how much to leave out.
        long = {"messages": [{"role": "user", "content": "x" * 2000}]}
        status, counted = await MessagesAsker(here).ask("/count_tokens", **long)
        assert (status, counted["input_tokens"] > 2000) == (200, True)
        status, body = await MessagesAsker(here).ask(**long)
        assert (status, f"long: {counted['input_tokens']} tokens" in str(body)) == (400, True)
        status, body = await MessagesAsker(here).ask("/count_tokens", messages=[])
        assert (status, body["type"], body["error"]["param"]) == (400, "error", "messages")


async def test_errors_have_their_own_shape(tmp_path: Path) -> None:
    """Wherever they come from, with the types that this protocol has."""
    path = tmp_path / "keys"
    path.write_text(hash_key("a", "ka"))
    async with gateway("", keys=KeyRing(path)) as here:
        ask = MessagesAsker(here).ask
        status, body = await ask()
        assert (status, body["type"]) == (401, "error")
        assert body["error"]["type"] == "authentication_error"
        right = {"x-api-key": "ka", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        assert (await ask(headers=right))[0] == 200
        for refusal, due, kind in (
            (Overloaded("full"), 503, "overloaded_error"),
            (WorkerLost("gone"), 503, "api_error"),
            (TooLarge("much"), 413, "request_too_large"),
        ):
            here.mesh.refusal = refusal
            status, body = await ask(headers=right, stream=True)
            assert (status, body["error"]["type"]) == (due, kind)
            assert body["error"]["message"] == refusal.message
        async with here.session.get(MessagesAsker(here).url) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")


async def test_a_stream_that_breaks_says_so() -> None:
    """An event of the type error, in this protocol's shape."""
    async with gateway("") as here:
        here.mesh.script = failing_after("the", WorkerLost("gone"))
        *_, last = await MessagesAsker(here).stream()
    assert last["type"] == "error"
    assert (last["error"]["type"], last["error"]["message"]) == ("api_error", "gone")


def block(fields: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [ASK, {"role": role, "content": [{"type": "text", "text": "a"}, fields]}]}


SECOND = "messages[1].content[1]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({name: {"x": 1}}, name) for name in MESSAGES_UNSERVED],
        ({"use_beam_search": True}, "use_beam_search"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}] * 1025}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        (block({"type": "image", "source": {}}), f"{SECOND}.type"),
        (block({"type": "redacted_thinking", "data": "x"}), f"{SECOND}.type"),
        (block({"type": "text"}), SECOND),
        (block({"type": "thinking", "thinking": "x"}), f"{SECOND}.type"),
        (block({"type": "tool_use"}), f"{SECOND}.type"),
        (block({**USE, "id": None}, "assistant"), f"{SECOND}.id"),
        (block({**USE, "name": ""}, "assistant"), f"{SECOND}.name"),
        (block(RESULT, "assistant"), f"{SECOND}.type"),
        (block(RESULT), f"{SECOND}.tool_use_id"),
        ({**block(RESULT), "system": "a"}, f"{SECOND}.tool_use_id"),
        (block({**RESULT, "content": [{"type": "image"}]}), f"{SECOND}.content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{**TOOLS[1], "input_schema": {"$ref": "#"}}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"model": "claude-9"}, "model"),
    ],
)
async def test_what_is_wrong_is_told_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    """A typed error whose param is a place in what the client wrote, not in the chat it became."""
    async with gateway("x") as here:
        for path in ("", "/count_tokens"):
            if path and fields == {"max_tokens": None}:
                continue
            status, body = await MessagesAsker(here).ask(path, **fields)
            error = body["error"]
            due = 404 if error["code"].endswith("not_found") else 400
            assert (status, body["type"], error["param"]) == (due, "error", param), error
            assert error["type"] in ("invalid_request_error", "not_found_error")
    assert not here.mesh.requests


async def test_fields_of_a_chat_are_served_here_too() -> None:
    """What a chat takes beside its messages does the same; what says nothing is let through."""
    async with gateway("hello and the end") as here:
        fields = {"seed": 7, "top_k": 3, "temperature": 0.5, "min_p": 0.25, "include_receipt": True}
        harmless = {
            **{"metadata": {"user_id": "x"}, "service_tier": "auto", "speed": "standard"},
            "context_management": {"edits": [{"keep": "all", "type": "clear_thinking_20251015"}]},
        }
        _, body = await MessagesAsker(here).ask(**fields, **harmless)
        sampling = here.mesh.requests[-1].sampling
        assert (sampling.seed, sampling.top_k, sampling.min_p) == (7, 3, 0.25)
        assert body["receipt"]["ttft_s"] == 0.5
        *_, end, _ = await MessagesAsker(here).stream(include_receipt=True)
        assert end["receipt"]["is_over"]


async def test_its_clients_find_the_requests_id() -> None:
    """In the header that they read, of answers and of errors, beside the one of all."""
    async with gateway("x") as here:
        url = MessagesAsker(here).url
        for body, status in (({"messages": [ASK], "max_tokens": 9}, 200), ({}, 400)):
            async with here.session.post(url, json=body) as response:
                assert response.status == status
                assert response.headers["request-id"] == response.headers["x-request-id"]
        async with here.session.post(here.url, json={"messages": [ASK]}) as response:
            assert "request-id" not in response.headers


async def test_what_is_for_anthropics_servers_is_not_for_the_model() -> None:
    """Claude Code's first system block is another one in each request."""
    async with gateway("x") as here:
        prompts: set[str] = set()
        for number in range(2):
            header = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
            texts = [{"type": "text", "text": text} for text in (header, "Be brief.")]
            assert (await MessagesAsker(here).ask(system=texts))[0] == 200
            prompts.add(here.prompt)
            assert (await MessagesAsker(here).ask(system=texts[:1]))[0] == 200
            assert "system" not in here.prompt
        assert prompts == {"system::Be brief.\nuser::hi\n"}


async def test_a_client_that_leaves_cancels_its_answer() -> None:
    """The mesh stops."""
    async with gateway("x") as here:
        gate = asyncio.Semaphore(1)
        here.mesh.script = saying("a b c d e f", per_batch=1, gate=gate)
        body = {"messages": [ASK], "max_tokens": 9, "stream": True}
        async with aiohttp.ClientSession() as session:
            response = await session.post(MessagesAsker(here).url, json=body)
            await response.content.readuntil(b"message_start\n")
            await here.mesh.wait_running(1)
            response.close()
        await here.mesh.wait_running(0)
