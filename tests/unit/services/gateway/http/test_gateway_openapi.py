"""The OpenAPI document against the gateway it describes: routes, bounds, answers, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway import limits
from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.http import anthropic_answers, bodies, door
from services.gateway.http.door import HttpDoor
from services.gateway.http.openapi import PARTS_OF_THE_PAGE, openapi_document
from services.gateway.http.server import Route
from services.gateway.http.structured_fields import STRUCTURED
from shared.version import VERSION
from tests.support.grammars import HAS_LIBRARY
from tests.support.http_client import HI, Client, gateway
from tests.support.scripted_mesh import MODEL, ScriptedMesh, front_door, saying

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
REQUIRED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "a", "echo": True},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
}


def document(**options: Any) -> dict[str, Any]:
    """The document of a gateway that serves the scripted model."""
    front = front_door(ScriptedMesh())
    routes = HttpDoor(front).routes()
    front.text.close()
    fields: dict[str, Any] = {"version": "1", "model": MODEL, "needs_key": True} | options
    return openapi_document(routes, max_choices=8, takes_templates=False, **fields)


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from nodes(item)


def routes_of_the_api() -> dict[tuple[str, str], Route]:
    """All but the parts of the page."""
    front = front_door(ScriptedMesh())
    routes = HttpDoor(front).routes()
    front.text.close()
    return {
        (route.method, route.path): route
        for route in routes
        if not route.path.startswith(PARTS_OF_THE_PAGE)
    }


def test_every_route_is_described_and_nothing_else() -> None:
    """By a sentence, its handler's docstring."""
    paths = document()["paths"]
    for method, path in routes_of_the_api():
        text = paths[path.replace(":.+}", "}")].pop(method.lower())["summary"]
        assert re.fullmatch(r"[A-Z][^.]*(\.json[^.]*)?\.", text), text
    assert not any(paths.values())


def test_every_reference_leads_somewhere_and_every_component_is_used() -> None:
    """No dangling $ref, no leftover."""
    whole = document()
    used = {node["$ref"] for node in nodes(whole) if "$ref" in node}
    made = {
        f"#/components/{kind}/{name}"
        for kind, members in whole["components"].items()
        if kind != "securitySchemes"
        for name in members
    }
    assert used == made
    names = [node["operationId"] for node in nodes(whole) if "operationId" in node]
    assert len(set(names)) == len(names) > 10


@pytest.mark.parametrize("has_keys", [True, False])
async def test_the_document_is_served_with_what_the_gateway_knows(
    has_keys: bool, tmp_path: Path
) -> None:
    """Model, version and whether a key is needed; a model that joins later is in it, too."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    mesh = ScriptedMesh(model=None)
    keys = KeyRing(path) if has_keys else None
    headers = {"Authorization": "Bearer secret"}
    async with gateway(mesh, keys) as client:
        _, _, before = await client.ask("GET", "/openapi.json", headers=headers)
        assert before == await _again(client, headers)
        mesh.model, mesh.not_ready_reason = MODEL, ""
        served = await _again(client, headers)
    assert served["info"]["version"] == VERSION
    assert served == json.loads(json.dumps(document(version=VERSION, needs_key=has_keys)))
    assert ({} in served["security"]) is not has_keys
    ids = "DetokenizeBody", "tokens"
    limit = [_field(whole, *ids)["items"].get("maximum") for whole in (before, served)]
    assert limit == [None, MODEL.vocab_size - 1]


async def _again(client: Client, headers: dict[str, str]) -> Any:
    return (await client.ask("GET", "/openapi.json", headers=headers))[2]


def _field(whole: dict[str, Any], struct: str, name: str) -> dict[str, Any]:
    return whole["components"]["schemas"][struct]["properties"][name]


# --- bodies ---------------------------------------------------------------------------------------


def test_every_field_that_is_parsed_is_described_and_no_other() -> None:
    """The described struct of a route is the one that its handler parses into."""
    schemas = document()["components"]["schemas"]
    decoders = {
        CHAT: door._CHAT,
        COMPLETIONS: door._COMPLETION,
        RESPONSES: door._RESPONSES,
        f"{RESPONSES}/input_tokens": door._RESPONSES,
        MESSAGES: door._MESSAGES,
        f"{MESSAGES}/count_tokens": door._COUNT_TOKENS,
        "/tokenize": door._TOKENIZE,
        "/detokenize": door._DETOKENIZE,
        "/cluster/workers/{worker}/role": door._ROLE,
    }
    routes = routes_of_the_api()
    assert decoders.keys() == {path for (_, path), route in routes.items() if route.body}
    for path, decoder in decoders.items():
        parsed = decoder.type
        assert routes["POST", path].body is decoder
        assert list(schemas[parsed.__name__]["properties"]) == list(parsed.__struct_fields__)


def test_what_a_running_gateway_knows_is_filled_in() -> None:
    """Model, context and choices; without a model its rules go, and no placeholder is left."""
    for fields in ({}, {"model": None}):
        assert not re.search("<[a-z_]", json.dumps(document(**fields)))
    name = _field(document(), "ChatBody", "model")["anyOf"][0]
    assert (name["enum"], _field(document(), "ChatBody", "n")["anyOf"][0]["maximum"]) == (
        [MODEL.name, ""],
        8,
    )


def companions(name: str, value: Any, path: str) -> dict[str, Any]:
    """What a right value of a field needs beside it."""
    if path == RESPONSES:
        return {"max_output_tokens": MODEL.max_model_len - 1} if name == "min_tokens" else {}
    if name == "best_of":
        return {"n": value}
    if name == "top_logprobs" and path == MESSAGES:
        return {}
    if name == "min_tokens":
        return {"max_tokens": MODEL.max_model_len - 1}
    return {"logprobs": True} if name == "top_logprobs" else {}


CONTEXT_BOUND = {
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"),
    *("messages", "input", "system"),
}
"""Bounded by the context that the prompt leaves."""


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at a field's bounds and just beyond, and whether each is right."""
    for branch in schema.get("anyOf", [schema]):
        step = 1 if branch.get("type") == "integer" else 1e-6
        if "minimum" in branch:
            yield branch["minimum"], True
            yield branch["minimum"] - step, False
        if "exclusiveMinimum" in branch:
            yield branch["exclusiveMinimum"], False
            yield branch["exclusiveMinimum"] + 1e-6, True
        if "maximum" in branch:
            yield branch["maximum"], True
            yield branch["maximum"] + step, False
        if "maxItems" in branch and "items" in branch:
            item = _example(branch["items"])
            yield [item] * branch["maxItems"], True
            yield [item] * (branch["maxItems"] + 1), False
        if "maxLength" in branch:
            yield "x" * branch["maxLength"], True
            yield "x" * (branch["maxLength"] + 1), False
        if "pattern" in branch:
            yield "a", True
            yield "a b", False
        for value in branch.get("enum", [branch["const"]] if "const" in branch else []):
            yield value, True
            yield ["no such"], False


def _example(schema: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return {"type": "text", "text": "x"} if schema["$ref"].endswith("/Block") else HI[0]
    return {"integer": 1, "string": "x"}.get(schema.get("type", ""), {})


@pytest.mark.parametrize(
    ("struct", "path"),
    [
        ("ChatBody", CHAT),
        ("CompletionBody", COMPLETIONS),
        ("ResponsesBody", RESPONSES),
        ("MessagesBody", MESSAGES),
    ],
)
async def test_bounds_are_those_that_the_gateway_enforces(struct: str, path: str) -> None:
    """What the document allows is accepted at the very bound; a step beyond is refused by name."""
    fields = document()["components"]["schemas"][struct]["properties"]
    for name in ("prompt", "tools", "tool_choice"):
        fields.pop(name, None)  # they have tests of their own
    for name in STRUCTURED if not HAS_LIBRARY else ():
        fields.pop(name)
    num_tried = 0
    async with gateway(ScriptedMesh(saying("abc"))) as client:
        for name, schema in fields.items():
            for value, is_right in edges(schema):
                num_tried += 1
                body = REQUIRED[path] | {name: value}
                body |= companions(name, value, path) if is_right else {}
                status, _, answer = await client.ask("POST", path, json=body)
                about = f"{name} = {value!r}: {answer}"
                if not is_right:
                    assert status == 400, about
                    assert answer["error"]["param"].startswith(name), about
                elif status == 400 and name in CONTEXT_BOUND:
                    assert answer["error"]["code"] == "context_length_exceeded", about
                else:
                    assert status == 200, about
    assert num_tried > 60


async def test_the_forms_of_a_prompt() -> None:
    """Each of the four is accepted; an empty or too long list of any is not."""
    most = limits.MAX_PROMPTS
    right = ["a", ["a"] * most, [5], [[5]] * most, [MODEL.vocab_size - 1]]
    wrong = ["", [], [""], [[]], ["a"] * (most + 1), [[5]] * (most + 1), [MODEL.vocab_size], [-1]]
    wrong.append(["a", 5])
    async with gateway(ScriptedMesh(saying("abc"))) as client:
        for prompts, due in ((right, 200), (wrong, 400)):
            for prompt in prompts:
                status, _, answer = await client.ask("POST", COMPLETIONS, json={"prompt": prompt})
                assert status == due, (prompt, answer)


# --- answers --------------------------------------------------------------------------------------


def described(shape: Any, answer: Any) -> Any:
    """Return the answer as far as the shape describes it. Raises: what it describes otherwise."""
    return msgspec.to_builtins(msgspec.json.decode(json.dumps(answer), type=shape))


EXTRAS: list[dict[str, Any]] = [
    {},
    {"n": 2, "include_receipt": True},
    {"stream_options": {"include_usage": True, "include_receipt": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": "and", "max_tokens": 20},
]


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_answers_have_the_described_fields_and_no_other(
    extra: dict[str, Any], has_logprobs: bool
) -> None:
    """Whole answers and every event of a stream."""
    asks: list[tuple[str, dict[str, Any], Any, Any]] = [
        (CHAT, {"messages": HI}, bodies.ChatCompletion, bodies.ChatCompletionChunk),
        (COMPLETIONS, {"prompt": "a", "echo": True}, bodies.Completion, bodies.CompletionChunk),
    ]
    async with gateway(ScriptedMesh()) as client:
        for path, body, whole, chunk in asks:
            fields = body | extra
            if has_logprobs:
                fields |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
            answer = await client.post(path, fields)
            assert described(whole, answer) == answer
            *events, done = await client.events(path, fields)
            assert done == "[DONE]"
            for event in events:
                assert described(chunk, event) == event


async def test_the_other_answers_too() -> None:
    """Models, tokens, probes, readiness that is missing, and errors."""
    mesh = ScriptedMesh()
    async with gateway(mesh) as client:
        asks: list[tuple[str, str, Any, Any, int]] = [
            ("GET", "/v1/models", None, bodies.ModelList, 200),
            ("GET", "/v1/models/tiny", None, bodies.ModelCard, 200),
            ("POST", "/tokenize", {"prompt": "a"}, bodies.Tokens, 200),
            ("POST", "/detokenize", {"tokens": [5]}, bodies.Text, 200),
            ("GET", "/health", None, bodies.Health, 200),
            ("GET", "/ready", None, bodies.Readiness, 200),
            ("GET", "/version", None, bodies.Version, 200),
            ("POST", CHAT, {}, bodies.ErrorBody, 400),
            ("GET", "/v1/models/other", None, bodies.ErrorBody, 404),
            ("POST", MESSAGES, REQUIRED[MESSAGES], anthropic_answers.MessageBody, 200),
            ("POST", MESSAGES, {}, anthropic_answers.AnthropicError, 400),
        ]
        for method, path, body, shape, due in asks:
            await _is_described(client, method, path, body, shape, due)
        mesh.model, mesh.not_ready_reason = None, "no worker has joined yet"
        await _is_described(client, "GET", "/ready", None, bodies.Readiness, 503)
        await _is_described(client, "POST", CHAT, {"messages": HI}, bodies.ErrorBody, 503)


async def _is_described(
    client: Client, method: str, path: str, body: Any, shape: Any, due: int
) -> None:
    status, _, answer = await client.ask(method, path, json=body)
    assert status == due
    assert described(shape, answer) == answer
