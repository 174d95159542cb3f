"""Tools over HTTP: what template and workers are told, and what comes back, whole and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from services.gateway.mesh import GenerationRequest, Tokens
from shared.errors import InvalidRequest
from shared.grammar import matcher
from tests.support.grammars import PERSON, byte_tokenizer_once, needs_library
from tests.support.http_client import HI
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.tiny_tokenizer import tiny_text_model, tiny_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> means {{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.reasoning_content }}:"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{{ message.tool_call_id }}\n{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 8}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LONG = "mcp__a-server_of_mine__" + "x" * 105
NAMED_WEATHER = {"type": "function", "function": {"name": "weather"}}
ALLOWED = "tool_choice.allowed_tools"
NAMED = {"type": "function", "function": {"name": "clock"}}


class Gateway:
    """One that says what it is told to. ask: returns status and body; stream: its chunks."""

    def __init__(self, url: str, session: aiohttp.ClientSession, mesh: ScriptedMesh) -> None:
        self.url, self.session, self.mesh = url, session, mesh

    async def ask(self, **fields: Any) -> tuple[int, Any]:
        body = {"messages": HI, **fields}
        async with self.session.post(self.url, json=body) as response:
            return response.status, await response.json()

    async def stream(self, **fields: Any) -> list[Any]:
        body = {"messages": HI, "stream": True, **fields}
        async with self.session.post(self.url, json=body) as response:
            lines = (await response.text()).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    @property
    def prompt(self) -> str:
        return tiny_tokenizer().decode(list(self.mesh.requests[-1].token_ids))


@asynccontextmanager
async def gateway(
    answer: str, *, template: str | None = TEMPLATE, **settings: Any
) -> AsyncGenerator[Gateway]:
    mesh, text = ScriptedMesh(saying(answer)), tiny_text_model(template)
    async with (
        http_gateway(mesh, text=text, **settings) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Gateway(f"{url}/v1/chat/completions", session, mesh)


async def test_a_call_whole() -> None:
    """The template shows the tools; the answer is a call, and null for text."""
    async with gateway(CALL) as here:
        status, body = await here.ask(tools=[WEATHER, CLOCK])
        assert status == 200
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert call["type"] == "function"
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
        assert here.prompt.startswith("<tool_call> means weather;<tool_call> means clock;")


async def test_a_call_in_a_stream() -> None:
    """Text, then the call's name, then its arguments in parts: together the whole answer."""
    async with gateway(f"I look. {CALL}") as here:
        options = {"include_usage": True}
        chunks = await here.stream(tools=[WEATHER], stream_options=options, logprobs=True)
        _, whole = await here.ask(tools=[WEATHER])
    *chunks, usage = chunks
    assert usage["usage"]["completion_tokens"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "I look. "
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert len(parts) > 3
    assert parts[0]["function"]["name"] == "weather"
    assert all("id" not in part and "name" not in part["function"] for part in parts[1:])
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(arguments) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["content"] == "I look. "
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(one["content"]) for one in told if one) == usage["usage"]["completion_tokens"]


XML_CALLS = {
    "qwen3_coder": (
        "<tool_call><function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "<tool_call><arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
}


@pytest.mark.parametrize("family", XML_CALLS)
async def test_a_call_whose_arguments_have_no_types(family: str) -> None:
    """The tool's schema has them, whole and streamed; a strict one is refused by name."""
    marks, call = XML_CALLS[family]
    parameters = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"function": {"name": "weather", "parameters": parameters}}
    due = {"city": "Paris", "days": 2}
    async with gateway(f"I look. {call}", template=f"{{{{ tools }}}}{marks}") as here:
        _, body = await here.ask(tools=[tool])
        chunks = await here.stream(tools=[tool])
        _, cut = await here.ask(tools=[tool], stop="aris")
        strict = {"function": {**tool["function"], "strict": True}}
        status, refused = await here.ask(tools=[strict])
    (choice,) = body["choices"]
    (called,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look. ", "tool_calls")
    assert called["function"]["name"] == "weather"
    assert json.loads(called["function"]["arguments"]) == due
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert [part["name"] for part in parts if "name" in part] == ["weather"]
    assert len(parts) > 4
    assert json.loads("".join(part["arguments"] for part in parts)) == due
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert (status, refused["error"]["code"]) == (400, "unsupported")


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("hermes", '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]NAME{}"),
        ("qwen3_coder", "<tool_call>\n<function=NAME>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>NAME\n</tool_call>"),
    ],
)
async def test_a_name_as_long_as_any(family: str, call: str) -> None:
    """128 characters, as Anthropic has it: a client puts a server's name before a tool's."""
    tool = {"function": {"name": LONG, "parameters": {"type": "object", "properties": {}}}}
    async with gateway(call.replace("NAME", LONG), tool_parser=family) as here:
        chunks = await here.stream(tools=[tool])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (name,) = (
        part["function"]["name"]
        for delta in deltas
        for part in delta.get("tool_calls", ())
        if "name" in part["function"]
    )
    assert name == LONG


async def test_a_call_that_a_stop_string_cuts_is_no_reason_to_run_it() -> None:
    """Whole and streamed; a call before it that ended is one."""
    for tools, choice in (([WEATHER], "auto"), ([CLOCK], "auto"), ([WEATHER], NAMED_WEATHER)):
        async with gateway('{"city": "Paris"}' if choice == NAMED_WEATHER else CALL) as here:
            fields = {"tools": tools, "tool_choice": choice, "stop": "aris"}
            _, whole = await here.ask(**fields)
            *_, last = await here.stream(**fields)
        for choice_body in (whole["choices"][0], last["choices"][0]):
            assert (choice_body["finish_reason"], choice_body["stop_reason"]) == ("stop", "aris")
    async with gateway(CALL) as here:
        _, whole = await here.ask(tools=[WEATHER], stop="</tool_call>")
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@needs_library
async def test_only_allowed_tools_are_called() -> None:
    """The model is shown all; what it calls beside them is text, and none that must come is."""
    async with gateway(CALL) as here:
        for choice, is_call in ((NAMED_WEATHER, True), (NAMED, False)):
            fields = {"tools": [WEATHER, CLOCK], "tool_choice": allowed("auto", choice)}
            _, body = await here.ask(**fields)
            message = body["choices"][0]["message"]
            assert message["content"] == (None if is_call else CALL)
            assert ("tool_calls" in message) is is_call
            assert here.prompt.count("means") == 2
        await here.ask(tools=[WEATHER, CLOCK], tool_choice=allowed("required", NAMED))
    grammar = here.mesh.requests[-1].sampling.grammar
    assert "clock" in grammar
    assert "weather" not in grammar


async def test_no_call_is_an_answer() -> None:
    """As without tools; with tool_choice none the template shows none."""
    async with gateway("Fine.") as here:
        _, body = await here.ask(tools=[WEATHER])
        assert body["choices"][0]["message"]["content"] == "Fine."
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "tool_calls" not in body["choices"][0]["message"]
        status, _ = await here.ask(tools=[WEATHER], tool_choice="none")
        assert status == 200
        assert "means" not in here.prompt


@needs_library
async def test_a_call_that_must_come() -> None:
    """Required: a list by grammar; named: its arguments; the same fields in the answer."""
    answer = (
        '[{"name": "clock", "parameters": {}}, {"name": "weather", "parameters": {"city": "x"}}]'
    )
    async with gateway(answer, template=TEMPLATE) as here:
        _, body = await here.ask(tools=[WEATHER, CLOCK], tool_choice="required")
        names = [one["function"]["name"] for one in body["choices"][0]["message"]["tool_calls"]]
        assert names == ["clock", "weather"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert '"f1"' in here.mesh.requests[-1].sampling.grammar
        several = here.mesh.requests[-1].sampling.grammar
        await here.ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        assert "maxItems" in here.mesh.requests[-1].sampling.grammar
        assert "maxItems" not in several
    async with gateway("{}") as here:
        _, body = await here.ask(tools=[WEATHER, CLOCK], tool_choice=NAMED)
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": "{}"}
        assert body["choices"][0]["finish_reason"] == "stop"  # as OpenAI has it
        chunks = await here.stream(tools=[WEATHER, CLOCK], tool_choice=NAMED)
        assert chunks[1]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "clock"


@needs_library
@pytest.mark.parametrize(
    ("more", "schema", "value"),
    [
        ({"$defs": {"x": {"const": 1}}}, {"$ref": "#/$defs/x"}, "1"),
        ({"$defs": {"x": {"const": 1}}, "$id": "https://a/b"}, {"$ref": "#/$defs/x"}, "1"),
        ({"$defs": {"x": {"const": 1, "$anchor": "one"}}}, {"$ref": "#one"}, "1"),
        ({}, {"const": {"$ref": "#/a"}}, '{"$ref": "#/a"}'),
    ],
)
async def test_references_of_a_tool_lead_where_they_did(
    more: dict[str, Any], schema: dict[str, Any], value: str
) -> None:
    """Its schema is a part of the list's; a value is no reference, whatever it looks like."""
    parameters = {
        **more,
        **{"properties": {"const": schema}, "required": ["const"], "additionalProperties": False},
    }
    function = {"name": "f", "parameters": parameters}
    async with gateway("[]") as here:
        status, body = await here.ask(tools=[{"function": function}], tool_choice="required")
        assert status == 200, body
        state = matcher(byte_tokenizer_once(), here.mesh.requests[-1].sampling.grammar)
    answer = f'[{{"name": "f", "parameters": {{"const": {value}}}}}]'
    assert state.validate_tokens(list(answer.encode())) == len(answer)


@needs_library
async def test_strict_tools_follow_their_schema() -> None:
    """With tool_choice auto: text is free until a call begins. Of other families by name."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    async with gateway(CALL) as here:
        status, body = await here.ask(tools=[strict])
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        assert "maxLength" in here.mesh.requests[-1].sampling.grammar
    async with gateway(CALL, tool_parser="mistral") as here:
        status, body = await here.ask(tools=[strict])
        assert (status, body["error"]["code"]) == (400, "unsupported")


@needs_library
@pytest.mark.parametrize("family", ["hermes", "llama3"])
async def test_a_format_is_of_answers_that_call_nothing(family: str) -> None:
    """The answer calls, or it is what response_format says; calls that must come come alone."""
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}
    arguments = "parameters" if family == "llama3" else "arguments"
    call = f'{{"name": "weather", "{arguments}": {{"city": "Paris"}}}}'
    text = '{"name": "Anna", "age": 7, "tags": []}'
    called = call if family == "llama3" else f"<tool_call>\n{call}\n</tool_call>"
    for answer, reason in ((called, "tool_calls"), (text, "stop")):
        async with gateway(answer, tool_parser=family) as here:
            _, body = await here.ask(tools=[WEATHER, CLOCK], **asked)
            grammar = here.mesh.requests[-1].sampling.grammar
        (choice,) = body["choices"]
        assert choice["finish_reason"] == reason
        assert choice["message"]["content"] == (text if reason == "stop" else None)
        state = matcher(byte_tokenizer_once(), grammar)
        assert state.try_consume_tokens(list(answer.encode())) == len(answer)
        assert state.is_accepting()
        for other in ("Hello", '{"name": 7', f"{text} "):
            state = matcher(byte_tokenizer_once(), grammar)
            assert state.try_consume_tokens(list(other.encode())) < len(other)
    async with gateway("[]", tool_parser=family) as here:
        status, _ = await here.ask(tools=[CLOCK], tool_choice="required", **asked)
        assert status == 200
        assert "tags" not in here.mesh.requests[-1].sampling.grammar
        bad = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
        _, body = await here.ask(tools=[CLOCK], response_format=bad)
        assert body["error"]["param"] == "response_format.json_schema.schema.not"
    async with gateway("x", tool_parser="pythonic") as here:
        status, body = await here.ask(tools=[CLOCK], **asked)
        assert (status, body["error"]["code"]) == (400, "unsupported")


async def test_schemas_of_tools_keep_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one is looked at by another thread, also with numbers beyond 64 bits."""
    threads: list[int] = []

    def look(schema: Any) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr("services.gateway.front.tool_fields.schema_fault", look)
    large = {"type": "object", "maxProperties": 10**20, "enum": ["x" * 5000]}
    async with gateway("x") as here:
        for parameters in (large, {"type": "object"}):
            function = {"name": "a", "parameters": parameters}
            assert (await here.ask(tools=[{"function": function}]))[0] == 200
    assert [one == threading.get_ident() for one in threads] == [False, True]


async def test_one_call_at_a_time() -> None:
    """Where parallel_tool_calls is false a second call is not told, whole and streamed."""
    async with gateway(f"{CALL}\n{CALL}") as here:
        for is_parallel, num_calls in ((True, 2), (False, 1)):
            fields = {"tools": [WEATHER], "parallel_tool_calls": is_parallel}
            _, body = await here.ask(**fields)
            (choice,) = body["choices"]
            assert len(choice["message"]["tool_calls"]) == num_calls
            assert choice["finish_reason"] == "tool_calls"
            deltas = [chunk["choices"][0]["delta"] for chunk in await here.stream(**fields)]
            told = [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta]
            assert sorted(set(told)) == list(range(num_calls))


@needs_library
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
async def test_a_function_without_parameters_gets_none(parameters: Any) -> None:
    """Its arguments are an empty object; what names no type is one all the same."""
    function = {"name": "clock", "parameters": parameters}
    async with gateway("{}") as here:
        await here.ask(tools=[{"function": function}], tool_choice=NAMED)
        state = matcher(byte_tokenizer_once(), here.mesh.requests[-1].sampling.grammar)
        assert state.try_consume_tokens(list(b'{"')) == 1
        function["parameters"] = {"properties": {"a": {}}}
        await here.ask(tools=[{"function": function}], tool_choice=NAMED)
        state = matcher(byte_tokenizer_once(), here.mesh.requests[-1].sampling.grammar)
        assert state.try_consume_tokens(list(b"7")) == 0
        assert state.try_consume_tokens(list(b'{"b": 1')) == 7


async def test_a_conversation_with_calls() -> None:
    """Calls and results of earlier turns are the template's to show, arguments as values."""
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with gateway("Wet.") as here:
        status, _ = await here.ask(messages=messages, tools=[WEATHER])
        assert status == 200
        assert "assistant:hm:weather(Oslo)" in here.prompt
        assert "tool::rainc1" in here.prompt


def a_call(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "clock", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}], **more}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), ('{"a":1}', '{"a": 1}')]
    + [(text, json.dumps(text)) for text in ("[]", "{", '{"a": NaN}', r'{"a": "\ud83d"}')],
)
async def test_arguments_that_are_no_object_are_shown_as_they_were_written(
    arguments: str, shown: str
) -> None:
    """A conversation goes on in which a model once wrote such a call; half a character stays an
    escape, and NaN a word."""
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    async with gateway("x", template=template) as here:
        status, body = await here.ask(messages=[*HI, a_call(arguments)])
        assert (status, here.prompt) == (200, shown), body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": f"{LONG}a"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK, {"name": "a"}]}, "tools[1].function"),
        ({"tools": [CLOCK, {"function": None}]}, "tools[1].function"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            f"{ALLOWED}.mode",
        ),
        ({"tools": [CLOCK], "tool_choice": {**NAMED, "type": "custom"}}, "tool_choice.type"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, ALLOWED),
        ({"tools": [CLOCK], "tool_choice": allowed("any", NAMED)}, f"{ALLOWED}.mode"),
        (
            {"tools": [CLOCK], "tool_choice": allowed("auto", NAMED, NAMED_WEATHER)},
            f"{ALLOWED}.tools[1].function.name",
        ),
        (
            {"tools": [CLOCK], "tool_choice": allowed("auto", {**NAMED, "type": "mcp"})},
            f"{ALLOWED}.tools[0].type",
        ),
        ({"tools": [CLOCK], "tool_choice": allowed("required")}, "tool_choice"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"$ref": "#"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [CLOCK] * 513}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [CLOCK]}, "tool_choice"),
        (
            {"tool_choice": {"function": {"name": "x"}}, "tools": [CLOCK]},
            "tool_choice.function.name",
        ),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*HI, a_call(), {"role": "tool", "tool_call_id": "b"}]},
            "messages[2].tool_call_id",
        ),
        ({"messages": [a_call(role="user")]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
            "messages[0].tool_call_id",
        ),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    """One typed error that says where."""
    async with gateway("x") as here:
        status, body = await here.ask(**fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert not here.mesh.requests


async def test_tools_to_be_tokenized() -> None:
    """As a chat's: shown by the template, and of another type refused by name."""
    async with gateway("x") as here:
        here.url = here.url.replace("v1/chat/completions", "tokenize")
        assert (await here.ask(tools=[CLOCK]))[0] == 200
        status, body = await here.ask(tools=[CLOCK, {"type": "web_search"}])
        assert (status, body["error"]["param"]) == (400, "tools[1].type")


@needs_library
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CLOCK], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}, "n": 2}, "response_format"),
    ],
)
async def test_a_grammar_that_fails_on_its_way(fields: dict[str, Any], param: str) -> None:
    """A worker's word for it comes with the field that the grammar came in."""

    async def fails(request: GenerationRequest) -> AsyncGenerator[Tokens]:
        raise InvalidRequest("it cannot be followed any more", code="grammar_failed")
        yield

    async with gateway("x") as here:
        here.mesh.script = fails
        status, body = await here.ask(**fields)
        error = body["error"]
        assert (status, error["param"], error["code"]) == (400, param, "grammar_failed")
        form = {"format": {"type": "json_object"}}
        url = here.url.replace("chat/completions", "responses")
        async with here.session.post(url, json={"input": "hi", "text": form}) as response:
            error = (await response.json())["error"]
        assert (error["param"], error["code"]) == ("text.format", "grammar_failed")


@needs_library
async def test_a_call_that_must_come_beside_another_structure() -> None:
    """One of the two."""
    async with gateway("x") as here:
        status, body = await here.ask(tools=[CLOCK], tool_choice="required", regex="a")
        assert (status, body["error"]["param"]) == (400, "regex")


async def test_a_model_that_knows_no_tools() -> None:
    """Its template shows none: refused, unless the grammar makes the call, or a flag says how."""
    plain = "{{ messages[0].content }}"
    async with gateway(CALL, template=plain) as here:
        status, body = await here.ask(tools=[CLOCK])
        assert (status, body["error"]["param"], body["error"]["code"]) == (
            400,
            "tools",
            "unsupported",
        )
    async with gateway(CALL, template=plain, tool_parser="hermes") as here:
        _, body = await here.ask(tools=[WEATHER])
        assert body["choices"][0]["finish_reason"] == "tool_calls"


@needs_library
async def test_thinking_is_told_apart() -> None:
    """Where the template knows it, or a flag says so; unless the client wants it as it came."""
    thinks = "{{ messages[0].content }}<think>"
    async with gateway("because</think>so", template=thinks) as here:
        _, body = await here.ask()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("because", "so")
        thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < thought < body["usage"]["completion_tokens"]
        told = await here.stream(stream_options={"include_usage": True})
        assert told.pop()["usage"] == body["usage"]
        deltas = [chunk["choices"][0]["delta"] for chunk in told]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "because"
        assert "".join(delta.get("content", "") for delta in deltas) == "so"
        _, body = await here.ask(separate_reasoning=False)
        assert body["choices"][0]["message"]["content"] == "because</think>so"
    strict = {"function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    async with gateway(f"because</think>{CALL}", template=TEMPLATE + "<think>") as here:
        _, body = await here.ask(tools=[strict])
        assert body["choices"][0]["message"]["reasoning_content"] == "because"
        assert body["choices"][0]["finish_reason"] == "tool_calls"
    async with gateway("<think>a</think>b", reasoning_parser="none") as here:
        _, body = await here.ask()
        assert body["choices"][0]["message"]["content"] == "<think>a</think>b"
    async with gateway("<think>a</think>b", reasoning_parser="think") as here:
        _, body = await here.ask(n=2)
        assert [one["message"]["content"] for one in body["choices"]] == ["b", "b"]
        thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        _, body = await here.ask()
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought / 2
