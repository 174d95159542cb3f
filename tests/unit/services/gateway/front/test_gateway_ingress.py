"""The gRPC door against a scripted mesh, without gRPC: its messages, trailers and refusals."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from services.gateway.front.auth import NOBODY, KeyRing, hash_key
from services.gateway.front.frontdoor import FrontDoor
from services.gateway.grpc.door import Inference
from services.gateway.text.chat_template import Rendering
from shared import wire
from shared.errors import (
    DeadlinePassed,
    Forbidden,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    Unauthorized,
    WorkerLost,
)
from shared.grammar import matcher
from shared.messages.columns import pack_u32, unpack_f32, unpack_u32
from tests.support.grammars import byte_tokenizer_once, needs_library
from tests.support.scripted_mesh import ScriptedMesh, failing_after, front_door, saying
from tests.support.tiny_tokenizer import tiny_text_model, tiny_tokenizer

THE = 265
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }} "
    "{{ tool.function.parameters.properties | length }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.reasoning_content }}:"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}"
    "{{ message.tool_call_id }};{% endfor %}"
)
WEATHER = wire.Tool(
    name="weather", parameters='{"type":"object","properties":{"city":{"type":"string"}}}'
)
CLOCK = wire.Tool(name="clock", description="Tells the time.")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK = [wire.ChatMessage(role="user", content="hi")]


class FakeStream:
    """A call in memory. gate: taken once a message sent, as if the client's window were that
    small."""

    def __init__(
        self,
        request: Any = None,
        *,
        metadata: dict[str, str] | None = None,
        deadline_at: float | None = None,
        gate: asyncio.Semaphore | None = None,
    ) -> None:
        self.metadata = metadata or {}
        self.deadline_at = deadline_at
        self.sent: list[wire.GenerateResponse] = []
        self.trailers: dict[str, str] = {}
        self._request = request
        self._gate = gate

    async def receive(self, *, within_s: float | None = None) -> Any:
        assert within_s is not None, "a caller that says nothing must not wait for ever"
        return self._request

    async def send(self, message: wire.GenerateResponse) -> None:
        if self._gate is not None:
            await self._gate.acquire()
        # What leaves must survive the wire.
        self.sent.append(wire.GenerateResponse.parse(bytes(message)))

    def set_trailer(self, key: str, value: str) -> None:
        self.trailers[key] = value


async def generate(
    front: FrontDoor, request: wire.GenerateRequest | None, **options: Any
) -> FakeStream:
    """Run one call to its end."""
    stream = FakeStream(request, **options)
    try:
        await Inference(front).generate(cast("Any", stream))
    finally:
        front.text.close()
    return stream


def joined(stream: FakeStream) -> tuple[str, list[int]]:
    """Return text and ids of a stream, whose indices must have no gap."""
    ids: list[int] = []
    for message in stream.sent:
        assert message.first_index == len(ids)
        ids += unpack_u32(message.token_ids)
    return "".join(message.text for message in stream.sent), ids


@pytest.mark.parametrize(
    "request_fields",
    [
        {"text": "the the"},
        {"token_ids": pack_u32([THE, 274 - 5])},
        {"messages": [wire.ChatMessage(role="user", content="hi")], "model": "tiny"},
    ],
)
async def test_an_answer_has_text_ids_and_one_end(request_fields: dict[str, Any]) -> None:
    """All three kinds of prompt; usage, finish reason and receipt come once, at the end."""
    mesh = ScriptedMesh(saying("hello and 🦊"))
    stream = await generate(front_door(mesh), wire.GenerateRequest(**request_fields))
    text, ids = joined(stream)
    assert text == "hello and 🦊"
    *before, last = stream.sent
    assert all(message.finish_reason == 0 and message.usage is None for message in before)
    assert last.finish_reason == wire.FinishReason.STOP
    assert last.usage is not None
    (request,) = mesh.requests
    assert last.usage.prompt_tokens == len(request.token_ids)
    assert last.usage.completion_tokens == len(ids)
    assert json.loads(stream.trailers["pdmesh-receipt"]) == {"ttft_s": 0.5, "is_over": True}
    assert stream.trailers["x-request-id"] == request.request_id.hex()
    assert request.sampling.max_tokens == 512 - len(request.token_ids)


async def test_messages_are_rendered_with_the_models_template() -> None:
    """The same template as over HTTP, the newer role name included."""
    mesh = ScriptedMesh()
    messages = [wire.ChatMessage(role="developer", content="hi")]
    await generate(front_door(mesh), wire.GenerateRequest(messages=messages))
    (request,) = mesh.requests
    text = tiny_tokenizer().decode(list(request.token_ids), skip_special_tokens=False)
    assert text == "<system>hi<eos><assistant>"


async def test_parameters_arrive() -> None:
    """Every parameter has its place, and absent ones their defaults."""
    mesh = ScriptedMesh()
    params = wire.GenerateParams(
        max_tokens=9, min_tokens=1, temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=7,
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, ignore_eos=True,
        logit_bias={4: 1.0}, stop_token_ids=pack_u32([5]), stop=["zzz"], logprobs=0,
    )  # fmt: skip
    request = wire.GenerateRequest(text="a", params=params, request_label="mine")
    await generate(front_door(mesh), request)
    (request_made,) = mesh.requests
    sampling = request_made.sampling
    assert request_made.label == "mine"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 1, 7)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.5,
        3,
        0.5,
        0.25,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert (sampling.frequency_penalty, sampling.ignore_eos) == (-0.5, True)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((4, 1.0),), (5,))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, None)


async def test_what_the_text_shows_and_who_shares_it() -> None:
    """A stop string and special tokens are shown if asked for; a salt parts the caches."""
    params = wire.GenerateParams(stop=["and"], include_stop_str_in_output=True)
    request = wire.GenerateRequest(text="a", params=params)
    assert joined(await generate(front_door(ScriptedMesh()), request))[0] == "hello and"
    mesh = ScriptedMesh(saying("<system>hi"))
    shown = wire.GenerateParams(skip_special_tokens=False)
    for params, text in ((wire.GenerateParams(), "hi"), (shown, "<system>hi")):
        request = wire.GenerateRequest(text="a", params=params, cache_salt="mine")
        assert joined(await generate(front_door(mesh), request))[0] == text
    await generate(front_door(mesh), wire.GenerateRequest(text="a"))
    assert mesh.requests[0].cache_salt == mesh.requests[1].cache_salt
    assert mesh.requests[0].cache_salt != mesh.requests[2].cache_salt
    with pytest.raises(InvalidRequest, match="cache_salt"):
        await generate(front_door(mesh), wire.GenerateRequest(text="a", cache_salt="a b"))


async def test_masks_and_truncation_arrive() -> None:
    """As over HTTP; what is cut is neither computed nor told of."""
    mesh = ScriptedMesh(saying("the the"))
    params = wire.GenerateParams(
        allowed_token_ids=pack_u32([9, 4]), bad_words=["the"], truncate_prompt_tokens=2,
        prompt_logprobs=0, max_tokens=5,
    )  # fmt: skip
    request = wire.GenerateRequest(token_ids=pack_u32([5, 6, 7]), params=params)
    stream = await generate(front_door(mesh), request)
    (asked,) = mesh.requests
    assert asked.token_ids == (6, 7)
    assert asked.sampling.allowed_token_ids == pack_u32([4, 9])
    assert asked.sampling.bad_words[0] == (THE,)
    assert len(stream.sent[0].prompt_logprobs) == 2


async def test_messages_are_rendered_as_asked() -> None:
    """Continued, without the prompt to answer, with a template and its variables; or refused."""
    rendered = {
        "<user>hi<eos><assistant>so": wire.Rendering(continue_final_message=True),
        "<user>hi<eos><assistant>so<eos>": wire.Rendering(add_generation_prompt=False),
        "hi 7": wire.Rendering(
            chat_template="{{ messages[0].content }} {{ x }}", chat_template_kwargs='{"x": 7}'
        ),
    }
    messages = [
        wire.ChatMessage(role="user", content="hi"),
        wire.ChatMessage(role="assistant", content="so"),
    ]
    for text, rendering in rendered.items():
        mesh = ScriptedMesh()
        front = front_door(mesh, trust_templates=True)
        await generate(front, wire.GenerateRequest(messages=messages, rendering=rendering))
        ids = list(mesh.requests[0].token_ids)
        assert tiny_tokenizer().decode(ids, skip_special_tokens=False) == text
    refused = {
        "chat_template": wire.Rendering(chat_template="x"),
        "chat_template_kwargs": wire.Rendering(chat_template_kwargs="[]"),
        "rendering": wire.Rendering(continue_final_message=True),
        "continue_final_message": wire.Rendering(
            continue_final_message=True, add_generation_prompt=True
        ),
    }
    for param, rendering in refused.items():
        prompt: dict[str, Any] = {"text": "hi"} if param == "rendering" else {"messages": messages}
        with pytest.raises(InvalidRequest) as caught:
            await generate(
                front_door(ScriptedMesh()), wire.GenerateRequest(rendering=rendering, **prompt)
            )
        assert caught.value.param == param


async def test_half_a_character_for_a_template_is_the_clients_fault() -> None:
    """JSON can name it, and no prompt can hold it."""
    rendering = wire.Rendering(chat_template="{{ x }}", chat_template_kwargs='{"x": "\\ud83d"}')
    messages = [wire.ChatMessage(role="user", content="hi")]
    front = front_door(ScriptedMesh(), trust_templates=True)
    with pytest.raises(InvalidRequest):
        await generate(front, wire.GenerateRequest(messages=messages, rendering=rendering))


async def test_logprobs_of_answer_and_prompt() -> None:
    """Columns a token; for prompt tokens the token itself comes first, the first of all
    unpredicted."""
    params = wire.GenerateParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    request = wire.GenerateRequest(token_ids=pack_u32([THE, 100]), params=params)
    stream = await generate(front_door(ScriptedMesh(saying("the the"))), request)
    (message,) = stream.sent
    assert list(unpack_f32(message.logprobs)) == [-0.25, -0.25]
    assert list(unpack_u32(message.top_logprobs[0].token_ids)) == [THE, THE + 1]
    first, second = message.prompt_logprobs
    assert list(unpack_u32(first.token_ids)) == [THE]
    assert math.isnan(unpack_f32(first.logprobs)[0])
    assert list(unpack_u32(second.token_ids)) == [100, 100]


async def test_a_stop_string_is_named() -> None:
    """The stop reason is the string or the token id that matched."""
    for params, reason in (
        (wire.GenerateParams(stop=["and"]), "and"),
        (wire.GenerateParams(stop_token_ids=pack_u32([1])), "1"),
        (wire.GenerateParams(), ""),
    ):
        request = wire.GenerateRequest(text="a", params=params)
        stream = await generate(front_door(ScriptedMesh(saying("one and two"))), request)
        assert stream.sent[-1].stop_reason == reason


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({}, InvalidRequest, "text"),
        ({"text": "a", "token_ids": pack_u32([1])}, InvalidRequest, "text"),
        ({"token_ids": b"\x01\x00\x00"}, InvalidRequest, "token_ids"),
        ({"token_ids": pack_u32([300])}, InvalidRequest, "token_ids"),
        ({"token_ids": pack_u32([1] * 512)}, InvalidRequest, "token_ids"),
        ({"text": "a", "model": "other"}, NotFound, "model"),
        ({"text": "a", "request_label": "a b"}, InvalidRequest, "request_label"),
        ({"text": "a", "params": {"temperature": math.nan}}, InvalidRequest, "temperature"),
        ({"text": "a", "params": {"max_tokens": 0}}, InvalidRequest, "max_tokens"),
        ({"text": "a", "params": {"stop": [""]}}, InvalidRequest, "stop"),
        ({"text": "a", "params": {"stop_token_ids": b"\0"}}, InvalidRequest, "stop_token_ids"),
        ({"text": "a", "params": {"logprobs": 21}}, InvalidRequest, "logprobs"),
        ({"messages": [("<x>", "hi")]}, InvalidRequest, "messages[0].role"),
        ({"messages": [("tool", "hi")]}, InvalidRequest, "messages[0].tool_call_id"),
        ({"messages": [("user", "hi")] * 1025}, InvalidRequest, "messages"),
    ],
)
async def test_refusals_are_those_of_http(
    fields: dict[str, Any], error: type[MeshError], param: str
) -> None:
    """The same rules, told with the field's name, before anything is dispatched."""
    if "params" in fields:
        fields = {**fields, "params": wire.GenerateParams(**fields["params"])}
    if "messages" in fields:
        messages = [wire.ChatMessage(role=role, content=text) for role, text in fields["messages"]]
        fields = {**fields, "messages": messages}
    mesh = ScriptedMesh()
    with pytest.raises(error) as caught:
        await generate(front_door(mesh), wire.GenerateRequest(**fields))
    assert caught.value.param == param
    assert mesh.requests == []


async def test_a_call_without_a_message_is_refused() -> None:
    """A client that half-closes at once gets an answer, not an internal error."""
    with pytest.raises(InvalidRequest):
        await generate(front_door(ScriptedMesh()), None)


async def test_keys_are_checked_on_every_method(tmp_path: Path) -> None:
    """Default deny: no method of the service is open."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    front = front_door(ScriptedMesh(), keys=KeyRing(path))
    door = Inference(front)
    for key, is_known in (("Bearer secret", True), ("Bearer wrong", False), ("", False)):
        stream = cast(
            "Any", FakeStream(wire.GenerateRequest(text="a"), metadata={"authorization": key})
        )
        for call in (
            lambda stream=stream: door.generate(stream),
            lambda stream=stream: door.tokenize(wire.TokenizeRequest(text="a"), stream),
            lambda stream=stream: door.list_models(wire.ListModelsRequest(), stream),
        ):
            if is_known:
                await call()
            else:
                with pytest.raises(Unauthorized):
                    await call()
    front.text.close()


async def test_a_key_that_may_only_ask_changes_no_role_over_grpc(tmp_path: Path) -> None:
    """The same right as over HTTP."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    front = front_door(ScriptedMesh(), keys=KeyRing(path))
    stream = cast("Any", FakeStream(None, metadata={"authorization": "Bearer secret"}))
    order = wire.ChangeRoleRequest(worker="a1", role="token")
    with pytest.raises(Forbidden, match="hash-key NAME --may roles"):
        await Inference(front).change_role(order, stream)
    front.text.close()


async def test_errors_of_the_mesh_pass_through() -> None:
    """Before the first token and after it; what was sent stays sent."""
    mesh = ScriptedMesh()
    mesh.refusal = Overloaded("full", retry_after_s=1)
    with pytest.raises(Overloaded):
        await generate(front_door(mesh), wire.GenerateRequest(text="a"))
    stream = FakeStream(wire.GenerateRequest(text="a"))
    front = front_door(ScriptedMesh(failing_after("the", WorkerLost("gone"))))
    with pytest.raises(WorkerLost):
        await Inference(front).generate(cast("Any", stream))
    assert joined(stream) == ("the", [THE])
    assert "pdmesh-receipt" not in stream.trailers
    front.text.close()


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its generation is cancelled instead of waiting for ever."""
    mesh = ScriptedMesh()
    front = front_door(mesh, stall_s=0.02)
    stream = FakeStream(wire.GenerateRequest(text="a"), gate=asyncio.Semaphore(1))
    with pytest.raises(DeadlinePassed) as caught:
        await Inference(front).generate(cast("Any", stream))
    assert caught.value.code == "client_too_slow"
    assert mesh.num_running == 0
    front.text.close()


async def test_the_callers_deadline_is_the_requests() -> None:
    """grpc-timeout, already turned into loop time, goes down to the mesh."""
    mesh = ScriptedMesh()
    await generate(front_door(mesh), wire.GenerateRequest(text="a"), deadline_at=1e9)
    assert mesh.requests[0].deadline_at == 1e9


async def test_tokenize_and_models() -> None:
    """Ids of text and messages, and the model that is served."""
    mesh = ScriptedMesh()
    front = front_door(mesh)
    door = Inference(front)
    stream = cast("Any", FakeStream())
    reply = await door.tokenize(wire.TokenizeRequest(text="the"), stream)
    assert (list(unpack_u32(reply.token_ids)), reply.max_model_len) == ([THE], 512)
    messages = [wire.ChatMessage(role="user", content="the")]
    reply = await door.tokenize(wire.TokenizeRequest(messages=messages), stream)
    assert THE in unpack_u32(reply.token_ids)
    with pytest.raises(InvalidRequest):
        await door.tokenize(wire.TokenizeRequest(), stream)
    (model,) = (await door.list_models(wire.ListModelsRequest(), stream)).models
    assert (model.name, model.max_model_len) == ("tiny", 512)
    mesh.model = None
    assert (await door.list_models(wire.ListModelsRequest(), stream)).models == []
    front.text.close()


# --- tools and thinking ---------------------------------------------------------------------------


async def chat(
    answer: str, *, template: str = TOOL_TEMPLATE, **fields: Any
) -> tuple[FakeStream, str]:
    """Ask for a chat; return the stream and the prompt that it made."""
    mesh = ScriptedMesh(saying(answer))
    front = front_door(mesh, text=tiny_text_model(template))
    stream = await generate(front, wire.GenerateRequest(**{"messages": ASK, **fields}))
    return stream, tiny_tokenizer().decode(list(mesh.requests[-1].token_ids))


def calls_of(stream: FakeStream) -> list[tuple[str, str]]:
    """Put calls together from their parts, as a client does."""
    calls: list[wire.ToolCall] = []
    for part in (part for message in stream.sent for part in message.tool_calls):
        if part.index == len(calls):
            calls.append(wire.ToolCall(id=part.id, name=part.name))
            assert len(part.id) == 9
        calls[part.index].arguments += part.arguments
    return [(call.name, call.arguments) for call in calls]


async def test_a_call_comes_apart_from_the_text() -> None:
    """The template shows the tools; parts of the call come as the model writes them, with the ids
    of all tokens, and the answer ends for the call to be run."""
    stream, prompt = await chat(f"I look. {CALL}", tools=[WEATHER, CLOCK])
    assert prompt.startswith("<tool_call> weather 1;<tool_call> clock 0;user:")
    text, ids = joined(stream)
    assert text.strip() == "I look."
    assert calls_of(stream) == [("weather", '{"city": "Paris"}')]
    *before, last = stream.sent
    assert sum(len(message.tool_calls) for message in before) > 1
    assert last.finish_reason == wire.FinishReason.TOOL_CALLS
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.reasoning_tokens) == (len(ids), 0)
    stream, prompt = await chat(CALL, tools=[WEATHER], tool_choice="none")
    assert prompt.startswith("user:")
    assert joined(stream)[0] == CALL
    stream, _ = await chat(CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)
    assert len(calls_of(stream)) == 1


@needs_library
async def test_calls_that_must_come_over_grpc() -> None:
    """One of them, or the one that is named."""
    one = '[{"name": "weather", "parameters": {"city": "Oslo"}}]'
    stream, _ = await chat(one, tools=[WEATHER, CLOCK], tool_choice="required")
    assert calls_of(stream) == [("weather", '{"city": "Oslo"}')]
    assert stream.sent[-1].finish_reason == wire.FinishReason.TOOL_CALLS
    stream, _ = await chat('{"city": "Oslo"}', tools=[WEATHER, CLOCK], tool_choice="weather")
    assert calls_of(stream) == [("weather", '{"city": "Oslo"}')]
    assert stream.sent[-1].finish_reason == wire.FinishReason.STOP


@needs_library
async def test_a_grammar_that_fails_on_its_way_over_grpc() -> None:
    """A worker's word for it comes with the field that the grammar came in, as over HTTP."""
    failed = InvalidRequest("it cannot be followed any more", code="grammar_failed")
    front = front_door(ScriptedMesh(failing_after("the", failed)))
    request = wire.GenerateRequest(text="the", params=wire.GenerateParams(regex="[a-z]+"))
    with pytest.raises(InvalidRequest) as caught:
        await generate(front, request)
    assert (caught.value.param, caught.value.code) == ("regex", "grammar_failed")


@needs_library
async def test_a_schema_is_of_answers_that_call_nothing_over_grpc() -> None:
    """As response_format over HTTP: an answer is a call, or JSON of the schema; other structures
    do not go with calls that must come."""
    schema = wire.GenerateParams(json_schema='{"type": "integer"}')
    for answer, calls in ((CALL, 1), ("42", 0)):
        mesh = ScriptedMesh(saying(answer))
        front = front_door(mesh, text=tiny_text_model(TOOL_TEMPLATE))
        request = wire.GenerateRequest(messages=ASK, tools=[WEATHER], params=schema)
        stream = await generate(front, request)
        assert len(calls_of(stream)) == calls
        grammar = mesh.requests[0].sampling.grammar
        assert grammar is not None
        state = matcher(byte_tokenizer_once(), grammar)
        assert state.try_consume_tokens(list(answer.encode())) == len(answer)
    digits = wire.GenerateParams(regex="[0-9]+")
    with pytest.raises(InvalidRequest, match="does not go with calls"):
        await chat("1", tools=[WEATHER], tool_choice="required", params=digits)


async def test_a_conversation_with_calls_over_grpc() -> None:
    """Thinking, calls and results of earlier turns are the template's to show."""
    called = wire.ToolCall(id="c1", name="weather", arguments='{"city": "Oslo"}')
    messages = [
        *ASK,
        wire.ChatMessage(role="assistant", reasoning="hm", tool_calls=[called]),
        wire.ChatMessage(role="tool", tool_call_id="c1", content="rain"),
    ]
    stream, prompt = await chat("Wet.", messages=messages, tools=[WEATHER])
    assert "assistant:hm:weather(Oslo);tool::rainc1;" in prompt
    assert joined(stream)[0] == "Wet."


async def test_thinking_comes_apart_over_grpc() -> None:
    """And is counted; unless the client wants it in the text."""
    thinks = "{{ messages[0].content }}<think>"
    stream, _ = await chat("because</think>so", template=thinks)
    assert "".join(message.reasoning for message in stream.sent) == "because"
    assert joined(stream)[0] == "so"
    usage = stream.sent[-1].usage
    assert usage is not None
    assert 0 < usage.reasoning_tokens < usage.completion_tokens
    stream, _ = await chat("because</think>so", template=thinks, separate_reasoning=False)
    assert joined(stream)[0] == "because</think>so"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [wire.Tool(name="a b")]}, "tools[0].name"),
        ({"tools": [CLOCK] * 513}, "tools"),
        ({"tools": [wire.Tool(name="f", parameters="[1]")]}, "tools[0].parameters"),
        (
            {"tools": [wire.Tool(name="f", parameters='{"type": "string"}')]},
            "tools[0].parameters.type",
        ),
        ({"tools": [WEATHER], "tool_choice": "clock"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": "a", "messages": [], "tools": [WEATHER]}, "tools"),
        ({"text": "a", "messages": [], "tool_choice": "auto"}, "tool_choice"),
        ({"text": "a", "messages": [], "separate_reasoning": False}, "separate_reasoning"),
        (
            {"messages": [wire.ChatMessage(role="tool", tool_call_id="c1")]},
            "messages[0].tool_call_id",
        ),
        (
            {"messages": [wire.ChatMessage(role="user", tool_calls=[wire.ToolCall(id="c")])]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_tools_that_are_refused_name_the_field(fields: dict[str, Any], param: str) -> None:
    """By the names of the message that the client wrote."""
    with pytest.raises(InvalidRequest) as caught:
        await chat("x", **fields)
    assert caught.value.param == param
    assert "function" not in caught.value.message.split(": ")[0]


async def test_a_turn_is_quicker_for_its_own_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a prompt to be tokenized must not learn what others wrote."""
    owners: list[bytes] = []
    front = front_door(ScriptedMesh())
    encode = front.text._turns.encode

    def noted(text: str, owner: bytes) -> list[int]:
        owners.append(owner)
        return encode(text, owner)

    monkeypatch.setattr(front.text._turns, "encode", noted)
    talk = [{"role": "user", "content": "the end " * 1000}]
    caller = front.new_caller("", {})
    try:
        for key in (NOBODY, replace(NOBODY, cache_salt=b"a"), replace(NOBODY, cache_salt=b"b")):
            for salt in (b"", b"a"):
                await front.chat_prompt(talk, Rendering(), replace(caller, key=key), salt)
    finally:
        front.text.close()
    assert len(set(owners)) == len(owners) == 6


async def test_tools_are_tokenized_with_their_messages() -> None:
    """As a prompt of Generate has them; of a text they are refused."""
    front = front_door(ScriptedMesh(), text=tiny_text_model(TOOL_TEMPLATE))
    door, stream = Inference(front), cast("Any", FakeStream())
    try:
        told = await door.tokenize(wire.TokenizeRequest(messages=ASK, tools=[CLOCK]), stream)
        ids = list(unpack_u32(told.token_ids))
        assert tiny_tokenizer().decode(ids).startswith("<tool_call> clock")
        with pytest.raises(InvalidRequest, match="tools"):
            await door.tokenize(wire.TokenizeRequest(text="a", tools=[CLOCK]), stream)
    finally:
        front.text.close()
