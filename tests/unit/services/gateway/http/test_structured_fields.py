"""The spellings of one wish, and what goes with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.http.openai_forms import ChatBody
from services.gateway.http.structured_fields import structure_of
from shared.errors import InvalidRequest
from tests.support.grammars import needs_library
from tests.support.http_client import HI
from tests.unit.services.gateway.http.test_request_fields import exchange

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}

CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [{"begin": "<f>", "content": CONTENT, "end": "</f>"}],
}


def tag_text(**changed: Any) -> str:
    return msgspec.json.encode({"format": FORMAT | changed}).decode()


def wish(**fields: Any) -> Any:
    body = msgspec.convert({"messages": HI, **fields}, ChatBody)
    return structure_of(body)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        wish(**fields)
    return error.value


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": NAMED,
            }
        },
        {"guided_json": SCHEMA},
        {"guided_json": msgspec.json.encode(SCHEMA).decode()},
        {"json_schema": msgspec.json.encode(SCHEMA).decode()},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_spellings_of_a_schema(fields: dict[str, Any]) -> None:
    """OpenAI's, vLLM's old and new, SGLang's, llama.cpp's: the same structure."""
    found = wish(**fields)
    assert (found.kind, found.value) == ("json_schema", SCHEMA)


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"structural_tag": tag_text(type="regex", pattern="a+")}, "regex", "a+"),
        ({"structural_tag": tag_text(type="grammar", grammar="a ::= b")}, "grammar", "a ::= b"),
        ({"structural_tag": tag_text(**CONTENT)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": "x"}, "grammar", "x"),
        ({"ebnf": "x"}, "grammar", "x"),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "x"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
def test_spellings_of_the_rest(fields: dict[str, Any], kind: str, value: Any) -> None:
    """Each becomes the structure of its kind."""
    found = wish(**fields)
    assert (found.kind, found.value) == (kind, value)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structural_tag": msgspec.json.encode(TAG).decode()},
        {"structural_tag": msgspec.json.encode({"format": FORMAT}).decode()},
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        {"structured_outputs": {"structural_tag": msgspec.json.encode(TAG).decode()}},
    ],
)
def test_spellings_of_a_tag(fields: dict[str, Any]) -> None:
    """Structures with their triggers."""
    found = wish(**fields)
    assert found.kind == "tags"
    assert found.value[0]["trigger"] == "<f"


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"regex": None}],
)
def test_what_asks_for_nothing(fields: dict[str, Any]) -> None:
    """Free text."""
    assert wish(**fields) is None


def test_spaces_between_the_parts() -> None:
    """A pattern of the client's, none at all, or ours."""
    assert wish(guided_json={}, guided_whitespace_pattern=" ?").whitespace == " ?"
    outputs = {"json": {}, "disable_any_whitespace": True}
    assert wish(structured_outputs=outputs).whitespace == ""
    assert wish(json_schema="{}").whitespace is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "format": FORMAT}}, "response_format.format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"structural_tag": "nothing"}, "structural_tag"),
        ({"structural_tag": tag_text(type="sequence")}, "structural_tag.format.type"),
        ({"structural_tag": tag_text(at_least_one=True)}, "structural_tag.format.at_least_one"),
        ({"structural_tag": tag_text(tags=[])}, "structural_tag.format"),
        (
            {"structural_tag": tag_text(tags=[FORMAT["tags"][0] | {"content": {"type": "regex"}}])},
            "structural_tag.format.tags[0].content.type",
        ),
        ({"structural_tag": tag_text(triggers=["<g"])}, "structural_tag.format.tags[0].begin"),
        ({"structural_tag": tag_text(triggers=["<f"] * 513)}, "structural_tag.format.triggers"),
        ({"structural_tag": tag_text(tags=FORMAT["tags"] * 513)}, "structural_tag.format"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": TAG["structures"] * 513,
                    "triggers": TAG["triggers"],
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "triggers": ["<g"]}},
            "response_format.structures[0].begin",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    """Two wishes, or one that is none: by its field."""
    assert refused(**fields).param == param


@needs_library
@pytest.mark.parametrize(
    "field",
    [{"min_tokens": 2}, {"ignore_eos": True}, {"allowed_token_ids": [9]}, {"bad_words": ["x"]}],
)
async def test_what_does_not_go_with_a_grammar(field: dict[str, Any]) -> None:
    """Fields that would choose tokens against it are refused by name; a bias goes with it."""
    body = {"messages": HI, "regex": "a+"}
    got = await exchange("/v1/chat/completions", body | field)
    assert (got.status, got.answer["error"]["param"]) == (400, next(iter(field)))
    assert (await exchange("/v1/chat/completions", body | {"logit_bias": {"9": 1}})).status == 200


@needs_library
async def test_every_answer_follows_it() -> None:
    """With n, logprobs, and on completions, too: workers get the grammar."""
    more = {"n": 2, "logprobs": 1, "max_tokens": 4}
    got = await exchange("/v1/completions", {"prompt": "x", "regex": "a+", **more})
    assert got.status == 200
    assert len({sampling.grammar for _, sampling, *_ in got.asked}) == 1
    assert "a+" in got.asked[1][1].grammar
