"""Every field of docs/request-fields.md, sent over HTTP: what comes back is what the page says."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import aiohttp
import pytest
from tokenizers import processors

from services.gateway.http.openai_forms import ChatBody, CompletionBody
from services.gateway.http.structured_fields import STRUCTURED
from services.gateway.http.unserved_fields import UNSERVED
from services.gateway.mesh import GenerationRequest, Tokens
from services.gateway.text.text_model import TextModel
from tests.support.grammars import HAS_LIBRARY
from tests.support.house import ROOT
from tests.support.http_client import HI
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.tiny_tokenizer import TEMPLATE, tiny_template, tiny_tokenizer

PAGE = ROOT / "docs" / "request-fields.md"
ROW = re.compile(r"\| `(\w+)` \| [\w ]+ \| ([\w –]+) \| ([\w –]+) \| `(\{.*\})` \| .*\|")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "the end"},
}


class Field(NamedTuple):
    """One field on one path."""

    path: str
    name: str
    verdict: str
    example: dict[str, Any]


def fields() -> list[Field]:
    """The table, without what is no field of a path."""
    found: list[Field] = []
    for row in ROW.findall(PAGE.read_text()):
        name, *verdicts, example = row
        for path, verdict in zip(BODIES, verdicts, strict=True):
            if verdict != "–":
                found.append(Field(path, name, verdict, json.loads(example.replace("\\|", "|"))))
    return found


def text_model() -> TextModel:
    """The tiny one, with a special token before each text and a template with variables."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<a> $A", special_tokens=[("<a>", tokenizer.token_to_id("<a>"))]
    )
    variables = (
        "{{ documents }}{{ reasoning_effort }}{{ shout }}{{ tools }}{# <tool_call> <think> #}"
    )
    return TextModel(tokenizer, tiny_template(variables + TEMPLATE))


async def script(request: GenerationRequest) -> AsyncGenerator[Tokens]:
    """An answer with a special token in its midst; a chat, which may be longer, thinks first."""
    thought = "<think>a</think>" if request.sampling.max_tokens > 16 else ""
    async for tokens in saying(thought + "hello <b> and the end")(request):
        yield tokens


class Exchange(NamedTuple):
    """What came back, and what workers were asked for."""

    status: int
    answer: Any
    asked: list[Any]


async def exchange(path: str, body: dict[str, Any], **settings: Any) -> Exchange:
    """Send one body to a fresh gateway, which draws the same random numbers every time."""
    mesh, text = ScriptedMesh(script), text_model()
    async with (
        http_gateway(mesh, text=text, **{"trust_templates": True, **settings}) as url,
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body) as response,
    ):
        answer = re.sub(r'"created":\d+', "", await response.text())
        return Exchange(
            response.status,
            answer if response.status == 200 else json.loads(answer),
            [(one.token_ids, one.sampling, one.cache_salt, one.asked) for one in mesh.requests],
        )


_PLAIN: dict[str, Exchange] = {}


async def plain_exchange(path: str, body: dict[str, Any]) -> Exchange:
    """What most fields are compared with, for which one exchange is enough."""
    key = json.dumps([path, body], sort_keys=True)
    if key not in _PLAIN:
        _PLAIN[key] = await exchange(path, body)
    return _PLAIN[key]


@pytest.mark.parametrize("field", fields(), ids=lambda field: f"{field.name}{field.path}")
async def test_what_comes_back_is_what_the_page_says(field: Field) -> None:
    """Served: something is different. Refused: by name. No effect: nothing is different."""
    if field.name in STRUCTURED and not HAS_LIBRARY:
        pytest.skip("llguidance is not installed")
    body = BODIES[field.path] | field.example
    without = {name: value for name, value in body.items() if name != field.name}
    plain = await plain_exchange(field.path, BODIES[field.path] | without)
    got = await exchange(field.path, body)
    assert plain.status == 200
    if field.verdict == "refused":
        error = got.answer["error"]
        assert (got.status, error["param"], error["code"]) == (400, field.name, "unsupported")
        assert not got.asked
    elif field.verdict == "no effect":
        assert got == plain
    else:
        assert field.verdict == "served"
        assert got != plain
        assert got.status == (404 if field.name == "model" else 200), got.answer


def test_the_page_has_every_field_that_the_gateway_knows() -> None:
    """A new field needs its row; a row that says served or refused needs its field."""
    for path, struct in zip(BODIES, (ChatBody, CompletionBody), strict=True):
        rows = [field for field in fields() if field.path == path]
        assert len({row.name for row in rows}) == len(rows)
        known = {row.name for row in rows if row.verdict != "no effect"}
        assert known == set(struct.__struct_fields__)
        refused = {row.name for row in rows if row.verdict == "refused"}
        assert set(UNSERVED) <= refused


@pytest.mark.parametrize("name", UNSERVED)
async def test_what_asks_for_nothing_is_let_through(name: str) -> None:
    """Clients that send every field with its default get their answer."""
    for path, body in BODIES.items():
        plain = await plain_exchange(path, body)
        for value in (None, *UNSERVED[name].harmless):
            assert await exchange(path, body | {name: value}) == plain


async def test_what_settings_bound_is_refused_by_name() -> None:
    """The number of answers, and whether a request may bring its template."""
    for fields, settings, words in (
        ({"n": 3}, {"max_choices": 2}, "between 1 and 2"),
        ({"chat_template": "x"}, {"trust_templates": False}, "--trust-templates"),
    ):
        got = await exchange("/v1/chat/completions", {"messages": HI, **fields}, **settings)
        assert (got.status, got.answer["error"]["param"]) == (400, next(iter(fields)))
        assert words in got.answer["error"]["message"]
    assert (await exchange("/v1/completions", {"prompt": "a", "n": 2}, max_choices=2)).status == 200


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [
        ({"truncate_prompt_tokens": 4}, 4),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, 4),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, 12),
        ({"truncate_prompt_tokens": -1}, 512 - 16),
        ({"truncate_prompt_tokens": 9999, "max_tokens": 1}, 511),
    ],
)
async def test_a_prompt_is_cut_at_its_beginning_or_its_end(
    fields: dict[str, Any], num_kept: int
) -> None:
    """To so many tokens, or to what leaves room for the answer in a context of 512."""
    ids = [9 + position % 200 for position in range(511)]
    got = await exchange("/v1/completions", {"prompt": ids, "echo": True, **fields})
    assert got.status == 200, got.answer
    ((asked, *_),) = got.asked
    due = ids[:num_kept] if fields.get("truncation_side") == "right" else ids[-num_kept:]
    assert list(asked) == due
    assert json.loads(got.answer.replace(",,", ","))["usage"]["prompt_tokens"] == num_kept


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncation_side": "middle"},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1 << 20]},
        {"bad_words": [""]},
        {"bad_words": ["  "]},
        {"bad_words": ["a"] * 257},
    ],
)
async def test_a_value_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    """By name, on both endpoints."""
    for path, body in BODIES.items():
        got = await exchange(path, body | fields)
        assert (got.status, got.answer["error"]["param"]) == (400, next(iter(fields)))
