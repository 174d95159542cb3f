"""/v1/responses: what becomes of its items, and what comes back, whole and as events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from services.gateway.http.anthropic_answers import MessagesFormat
from services.gateway.http.openai_answers import AnswerHead
from services.gateway.http.responses_forms import RESPONSES_UNSERVED
from services.gateway.text.calls.parser import Said
from shared.errors import Overloaded, WorkerLost
from tests.support.grammars import needs_library
from tests.support.http_client import parse_named_events
from tests.support.scripted_mesh import failing_after, saying
from tests.unit.services.gateway.http.test_tools import CALL, CLOCK, WEATHER, Gateway, gateway

PATH = "/v1/responses"
FLAT: list[dict[str, Any]] = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
ENCRYPTED = "reasoning.encrypted_content"
RESULT = {"type": "function_call_output", "output": "sun"}


class Asker:
    """A client of the route."""

    def __init__(self, here: Gateway) -> None:
        self.here = here
        self.url = here.url.removesuffix("/v1/chat/completions") + PATH

    async def ask(self, given: Any = "hi", **fields: Any) -> tuple[int, Any]:
        body = {"input": given, **fields}
        async with self.here.session.post(self.url, json=body) as response:
            return response.status, await response.json()

    async def stream(self, given: Any = "hi", **fields: Any) -> list[Any]:
        body = {"input": given, "stream": True, **fields}
        async with self.here.session.post(self.url, json=body) as response:
            assert response.status == 200
            events = parse_named_events(await response.read())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def said(response: Any) -> list[tuple[str, str]]:
    """What each item is, and says."""
    told: list[tuple[str, str]] = []
    for item in response["output"]:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        told.append((item["type"], text))
    return told


THINKS = f"<think>so so</think>I look. {CALL}\n{CALL}"
SAID = [
    ("reasoning", "so so"),
    ("message", "I look. "),
    ("function_call", '{"city": "Paris"}'),
    ("function_call", '{"city": "Paris"}'),
]


async def test_an_answer_whole_and_as_events() -> None:
    """Thinking, text and two calls are four items; the events of a stream add up to them."""
    async with gateway(THINKS, reasoning_parser="think") as here:
        status, whole = await Asker(here).ask(tools=FLAT, metadata={"a": "b"})
        events = await Asker(here).stream(tools=FLAT, metadata={"a": "b"})
    assert (status, whole["status"], said(whole)) == (200, "completed", SAID)
    assert whole["metadata"] == {"a": "b"}
    assert whole["tools"][0]["name"] == "weather"
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-1] == "completed"
    last = events[-1]["response"]
    assert said(last) == SAID
    assert last["usage"] == whole["usage"]
    assert 0 < last["usage"]["output_tokens_details"]["reasoning_tokens"] < 30
    for index, item in enumerate(last["output"]):
        own = [event for event in events if event.get("output_index") == index]
        parts = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert parts == SAID[index][1]
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    done = [event for event in events if event["type"].endswith("arguments.done")]
    assert [(event["name"], event["arguments"]) for event in done] == [
        ("weather", '{"city": "Paris"}')
    ] * 2


async def test_an_answer_that_tokens_cut_short() -> None:
    """Incomplete, with the reason, whole and streamed; so is its last item."""
    async with gateway("a long story") as here:
        _, whole = await Asker(here).ask(max_output_tokens=3)
        *_, last = await Asker(here).stream(max_output_tokens=3)
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert response["max_output_tokens"] == 3


async def test_a_call_that_a_stop_string_cuts_is_not_complete() -> None:
    """Whole and streamed: nobody shall run half a call."""
    async with gateway(CALL) as here:
        _, whole = await Asker(here).ask(tools=FLAT, stop="aris")
        *_, last = await Asker(here).stream(tools=FLAT, stop="aris")
        for response in (whole, last["response"]):
            (call,) = response["output"]
            assert (call["arguments"], call["status"]) == ('{"city": "P', "incomplete")


async def test_spaces_before_a_call_are_no_message() -> None:
    """Whole and streamed; an answer of spaces alone is one."""
    async with gateway(f"\n\n{CALL}") as here:
        _, whole = await Asker(here).ask(tools=FLAT)
        *_, last = await Asker(here).stream(tools=FLAT)
    assert said(whole) == said(last["response"]) == [("function_call", '{"city": "Paris"}')]
    async with gateway("  ") as here:
        _, whole = await Asker(here).ask()
    assert said(whole) == [("message", "  ")]


def test_spaces_without_end_cost_no_more_with_each_token() -> None:
    """A model that writes nothing else before its answer holds its gateway up for nobody."""
    no_text: Any = None
    answer = MessagesFormat(AnswerHead(id="", model="m", created=0), no_text, None)
    taken_s = [0.0, 0.0]
    for turn in range(2):
        began_at = time.process_time()
        for _ in range(8000):
            assert not list(answer._said(Said("\n" * 64)))
        taken_s[turn] = time.process_time() - began_at
    assert taken_s[1] < 2 * taken_s[0] + 0.1


async def test_a_stream_that_breaks_says_so() -> None:
    """response.failed, with code and sentence; before the first token it is a status."""
    async with gateway("") as here:
        here.mesh.script = failing_after("the", WorkerLost("gone"))
        *_, last = await Asker(here).stream()
        here.mesh.refusal = Overloaded("full")
        status, body = await Asker(here).ask(stream=True)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "worker_lost", "message": "gone"}
    assert said(last["response"]) == [("message", "the")]
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert (status, body["error"]["code"]) == (503, "overloaded")


async def test_items_become_the_messages_of_a_chat() -> None:
    """What one answer said is one message; the template sees results where they belong."""
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "how is"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"A"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city":"B"}'},
        {**RESULT, "call_id": "c1"},
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    async with gateway("x") as here:
        status, body = await Asker(here).ask(items, instructions="Be brief.")
        assert status == 200, body
        assert here.prompt == (
            "system::Be brief.\nsystem::Be kind.\nuser::how is\n"
            "assistant:hm:I look.weather(A)weather(B)\ntool::sunc1\ntool::rainc2\n"
        )


async def test_functions_of_a_namespace() -> None:
    """The model calls them by both names, and clients are told the two, whole and as events."""
    call = CALL.replace("weather", "sky__weather")
    space = {"type": "namespace", "name": "sky", "description": "Above.", "tools": [FLAT[0]]}
    given: dict[str, Any] = {"tools": [FLAT[0], space]}
    async with gateway(call) as here:
        _, whole = await Asker(here).ask(**given)
        events = await Asker(here).stream(**given)
        (called,) = whole["output"]
        assert (called["namespace"], called["name"]) == ("sky", "weather")
        items = [{"role": "user", "content": "how?"}, called]
        status, body = await Asker(here).ask(items, **given)
        assert status == 200, body
        assert "sky__weather(Paris)" in here.prompt
    (shown,) = events[-1]["response"]["output"]
    assert (shown["namespace"], shown["name"]) == ("sky", "weather")
    (done,) = [one for one in events if one["type"].endswith("arguments.done")]
    assert done["name"] == "weather"
    async with gateway(CALL) as here:
        _, whole = await Asker(here).ask(**given)
    assert "namespace" not in whole["output"][0]


@needs_library
async def test_text_that_must_match() -> None:
    """text.format is response_format's; what is wrong with it is told by its own name."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with gateway('{"a": 1}') as here:
        asked = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
        status, body = await Asker(here).ask(text=asked)
        assert (status, said(body)) == (200, [("message", '{"a": 1}')])
        assert here.mesh.requests[-1].sampling.grammar
        assert body["text"]["format"]["schema"] == schema
        await Asker(here).ask(text={"format": {"type": "json_object"}})
        assert here.mesh.requests[-1].sampling.grammar
        endless = {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}
        status, body = await Asker(here).ask(text=endless)
    assert (status, body["error"]["param"]) == (400, "text.format.schema")


@needs_library
async def test_calls_that_must_come() -> None:
    """Required and by name; none shows the template no tool."""
    named = {"type": "function", "name": "clock"}
    async with gateway('{"a": 1}') as here:
        _, body = await Asker(here).ask(tools=FLAT, tool_choice=named)
        assert said(body) == [("function_call", '{"a": 1}')]
        assert body["output"][0]["name"] == "clock"
        await Asker(here).ask(tools=FLAT, tool_choice="none")
        assert "<tool_call>" not in here.prompt
    async with gateway('[{"name": "clock", "parameters": {"b": 2}}]') as here:
        _, body = await Asker(here).ask(
            tools=FLAT, tool_choice="required", parallel_tool_calls=False
        )
        assert said(body) == [("function_call", '{"b": 2}')]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@needs_library
async def test_only_allowed_tools_are_called() -> None:
    """The model is shown all, and the answer tells what was asked."""
    choice = allowed("required", "clock")
    async with gateway('[{"name": "clock", "parameters": {"b": 2}}]') as here:
        _, body = await Asker(here).ask(tools=FLAT, tool_choice=choice)
        assert here.prompt.count("<tool_call>") == len(FLAT)
    assert said(body) == [("function_call", '{"b": 2}')]
    assert body["tool_choice"] == choice


ASK: dict[str, Any] = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({name: {"x": 1}}, name) for name in RESPONSES_UNSERVED],
        ({"use_beam_search": True}, "use_beam_search"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [ASK, {"role": "pope", "content": "a"}]}, "input[1].role"),
        ({"input": [ASK, {"role": "tool", "content": "a"}]}, "input[1].role"),
        ({"input": [{**ASK, "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [ASK, {**RESULT, "call_id": "c"}]}, "input[1].call_id"),
        ({"input": [ASK, {**RESULT}], "instructions": "b"}, "input[1].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a" * 600}, "input"),
        ({"temperature": 9}, "temperature"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace"}]}, "tools[0].name"),
        (
            {"tools": [FLAT[0], {"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]},
            "tools[1].tools[0].type",
        ),
        (
            {"tools": [{"type": "namespace", "name": "x", "tools": [FLAT[0], FLAT[0]]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": [FLAT[0], FLAT[0]]}, "tools[1].name"),
        ({"tools": [{**FLAT[1], "parameters": {"$ref": "#"}}]}, "tools[0].parameters"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": FLAT, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.type"),
        ({"tools": FLAT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": allowed("any", "clock")}, "tool_choice.mode"),
        ({"tools": FLAT, "tool_choice": allowed("auto", "x")}, "tool_choice.tools[0].name"),
        ({"tools": FLAT, "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0].type"),
        ({"include": [ENCRYPTED, "message.output_text.logprobs"]}, "include"),
        ({"model": "gpt-9"}, "model"),
    ],
)
async def test_what_is_wrong_is_told_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    """A typed error whose param is a place in what the client wrote, not in the chat it became."""
    async with gateway("x") as here:
        status, body = await Asker(here).ask(**{"given": fields.pop("input", "hi"), **fields})
    error = body["error"]
    assert (status, error["param"]) == (
        404 if error["code"] == "model_not_found" else 400,
        param,
    ), error
    assert "messages[" not in error["message"]
    assert not here.mesh.requests


async def test_fields_of_a_chat_are_served_here_too() -> None:
    """What a chat takes beside its messages does the same here."""
    async with gateway("hello and the end") as here:
        fields = {"seed": 7, "top_k": 3, "stop": "and", "temperature": 0.5, "min_p": 0.25}
        _, body = await Asker(here).ask(**fields, include_receipt=True)
        sampling = here.mesh.requests[-1].sampling
        assert (sampling.seed, sampling.top_k, sampling.min_p) == (7, 3, 0.25)
        assert said(body) == [("message", "hello ")]
        assert body["receipt"]["ttft_s"] == 0.5
        assert body["temperature"] == 0.5
        for fields in (
            {"reasoning": {"effort": "none", "summary": "auto"}},
            {"include": [ENCRYPTED]},
        ):
            assert (await Asker(here).ask(**fields))[0] == 200
        *_, last = await Asker(here).stream(stream_options={"include_receipt": True})
        assert last["response"]["receipt"]["is_over"]


async def test_a_client_that_leaves_cancels_its_response() -> None:
    """The mesh stops, and nothing is kept of half an answer."""
    async with gateway("x") as here:
        gate = asyncio.Semaphore(1)
        here.mesh.script = saying("a b c d e f", per_batch=1, gate=gate)
        body = {"input": "a", "stream": True}
        async with aiohttp.ClientSession() as session:
            response = await session.post(Asker(here).url, json=body)
            await response.content.readuntil(b"created\n")
            await here.mesh.wait_running(1)
            response.close()
        await here.mesh.wait_running(0)


async def test_input_is_counted_without_an_answer() -> None:
    """As many tokens as the answer's usage tells."""
    async with gateway("x") as here:
        asker = Asker(here)
        asked: dict[str, Any] = {"instructions": "a b c", "tools": FLAT}
        _, body = await asker.ask(**asked)
        asker.url += "/input_tokens"
        status, counted = await asker.ask(**asked)
        due = {"object": "response.input_tokens", "input_tokens": body["usage"]["input_tokens"]}
        assert (status, counted) == (200, due)
        assert len(here.mesh.requests) == 1
        status, counted = await asker.ask("x" * 2000, max_output_tokens=500)
        assert (status, counted["input_tokens"] > 2000) == (200, True)
        for more, due in (({}, 406), ({"truncate_prompt_tokens": -1}, 12)):
            asked = {"max_output_tokens": 500, **more}
            status, counted = await asker.ask("x" * 400, **asked)
            assert (status, counted.get("input_tokens")) == (200, due)
        status, refused = await asker.ask("x", max_output_tokens=512)
        assert (status, refused["error"]["param"]) == (400, "max_output_tokens")


async def test_thinking_that_comes_back_unread() -> None:
    """Clients that keep nothing but encrypted_content send that; another's says nothing."""
    async with gateway("<think>it is é</think>x", reasoning_parser="think") as here:
        asker = Asker(here)
        _, plain = await asker.ask()
        assert "encrypted_content" not in plain["output"][0]
        _, body = await asker.ask(include=[ENCRYPTED])
        thought = body["output"][0]
        *_, last = await asker.stream(include=[ENCRYPTED])
        assert last["response"]["output"][0]["encrypted_content"] == thought["encrypted_content"]
        bare = {"type": "reasoning", "summary": [], "content": []}
        for content, shown in (
            (thought["encrypted_content"], "it is é"),
            ("gAAAA", ""),
            ("pdmesh1.!", ""),
            (None, ""),
        ):
            item = {**bare, "encrypted_content": content}
            said = {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
            status, _ = await asker.ask([ASK, item, said, ASK])
            assert status == 200
            assert f"assistant:{shown}:x\n" in here.prompt


async def test_thinking_that_nobody_can_read_is_no_turn() -> None:
    """An answer cut within it leaves no empty message, and calls around it stay one message."""
    unread = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    call = {"type": "function_call", "name": "weather", "arguments": '{"city": "A"}'}
    calls = [{**call, "call_id": "1"}, unread, {**call, "call_id": "2"}]
    async with gateway("x") as here:
        status, _ = await Asker(here).ask([ASK, unread, ASK])
        assert (status, here.prompt) == (200, "user::a\nuser::a\n")
        await Asker(here).ask([ASK, *calls])
        assert here.prompt == "user::a\nassistant::weather(A)weather(A)\n"
        status, body = await Asker(here).ask([unread])
        assert (status, body["error"]["param"]) == (400, "input")
