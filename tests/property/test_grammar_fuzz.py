"""Schemas, patterns and tools that nobody would write: each is served or refused by one typed
error, in bounded time, and what is served is never wider than it was asked."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from services.gateway.front.tool_fields import NamedTool, ToolBody, tool_use
from services.gateway.text.calls.families import PARSERS
from services.gateway.text.grammars import Grammars, Kind, Structure
from shared.bounds import ToolFamily
from shared.errors import InvalidRequest
from shared.grammar import matcher
from tests.support.grammars import byte_tokenizer_once, needs_library

pytestmark = needs_library

LONGEST = 300
"""Bytes of a drawn answer; longer ones are left unfinished."""

NAMES = st.sampled_from("abc")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)
COUNTS = st.integers(0, 4) | st.sampled_from([-1, 10**6, 2.5])
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
PATTERNS = st.sampled_from(["^a*$", "b", "^[a-c]{2,3}$", "(", "(a|b)+c", r"^\d+$", "(a*)*b", ""])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#a", "b.json", ""])
FAR = st.sampled_from([2**53, 2**60, 2**63, 10**18]).flatmap(
    lambda far: st.sampled_from([far - 1, far, far + 1, -far - 1, -far, 1 - far])
)
_LEAF = {
    "enum": st.lists(JSON, max_size=3),
    "const": JSON,
    "minLength": COUNTS,
    "maxLength": COUNTS,
    "pattern": PATTERNS,
    "format": st.sampled_from(["date", "uuid", "int32", "nobody's"]),
    "minimum": st.integers(-5, 5) | FAR,
    "maximum": st.integers(-5, 5) | st.floats(-5, 5) | FAR,
    "exclusiveMinimum": st.integers(-5, 5) | FAR,
    "exclusiveMaximum": FAR,
    "multipleOf": st.sampled_from([1, 2, 0.5, 0, -1]),
    "description": st.text(max_size=5),
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3),
    "$ref": REFERENCES,
}


def _some(fields: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """A few of the keywords: a schema of all of them is refused for the first."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({one: fields[one] for one in some}))


LEAVES = st.tuples(TYPES, _some(_LEAF, 2)).map(lambda drawn: {"type": drawn[0]} | drawn[1])


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    fields = {
        "properties": named,
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
        "items": inner,
        "prefixItems": several,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("anyOf", "allOf", "oneOf"), several),
        **dict.fromkeys(("not", "if", "then"), inner),
        "$defs": named,
        "$id": REFERENCES,
        "type": TYPES,
        "x-guidance": JSON,
    }
    return _some(fields, 4)


SCHEMAS = st.recursive(LEAVES | st.booleans(), _nested, max_leaves=8)
BROKEN = SCHEMAS | st.tuples(SCHEMAS, st.sampled_from(["properties", "type", "items"]), JSON).map(
    lambda drawn: {**(drawn[0] if isinstance(drawn[0], dict) else {}), drawn[1]: drawn[2]}
)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """With the process that a gateway has: what never ends is ended there."""
    one = Grammars()
    yield one
    one.close()


async def served(grammars: Grammars, structure: Structure) -> str | None:
    """The grammar; None = refused by an error that names the field."""
    try:
        return await grammars.checked(structure)
    except InvalidRequest as caught:
        error = caught
    assert error.param is not None
    assert error.message.startswith(f"{error.param}: ")
    assert len(error.message) < 1000
    return None


def drawn_answer(grammar: str, seed: int) -> str | None:
    """One of the answers that the masks let through, None = it did not end by itself."""
    state = matcher(byte_tokenizer_once(), grammar)
    assert not state.is_error(), state.get_error()
    chance = random.Random(seed)
    data = bytearray()
    while len(data) < LONGEST:
        mask = int.from_bytes(state.compute_bitmask(), "little")
        allowed = [one for one in range(256) if mask >> one & 1]
        if state.is_accepting() and (not allowed or chance.random() < 0.5):
            return data.decode()
        if not allowed or state.is_error():  # a bound of one step: the worker ends such an answer
            return None
        likely = [one for one in allowed if one in b'"}],: 0a1'] or allowed
        byte = chance.choice(likely if chance.random() < 0.8 else allowed)
        assert state.consume_token(byte)
        data.append(byte)
    return None


def is_of_the_draft(schema: Any) -> bool:
    """The library takes some of what only older drafts know, too: lists as ``items``."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


@given(schema=BROKEN, seed=st.integers(0, 99))
@example(schema={"type": [[]]}, seed=0)
@example(schema={"const": 2**53 + 1}, seed=0)
@example(schema={"type": "integer", "minimum": 10**30, "maximum": 10**31}, seed=0)
@example(schema={"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 2}, seed=0)
@example(schema={"allOf": [{}], "$ref": f"#/allOf/{'9' * 5000}"}, seed=0)
async def test_a_schema_is_served_or_refused_and_never_wider(
    schema: Any, seed: int, grammars: Grammars
) -> None:
    """Whatever the masks let through is what another library calls valid."""
    structure = Structure(kind="json_schema", value=schema, param="field", whitespace="")
    grammar = await served(grammars, structure)
    answer = drawn_answer(grammar, seed) if grammar is not None else None
    event("refused" if grammar is None else "unfinished" if answer is None else "answered")
    if answer is not None and is_of_the_draft(schema):
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))


@given(
    text=st.text(st.sampled_from("ab01()[]{}*+?|\\^$.,-"), max_size=30) | st.text(max_size=10),
    kind=st.sampled_from(["regex", "grammar"]),
)
@example(text="((a{1,999}){1,999}){1,999}", kind="regex")
@example(text="start: a\na: b\nb: a", kind="grammar")
async def test_a_pattern_is_served_or_refused(text: str, kind: Kind, grammars: Grammars) -> None:
    """Patterns and grammars of any characters."""
    grammar = await served(grammars, Structure(kind=kind, value=text, param="field"))
    event("refused" if grammar is None else "served")
    if grammar is not None:
        assert not matcher(byte_tokenizer_once(), grammar).is_error()


TOOLS = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": NAMES},
            optional={
                "parameters": SCHEMAS.filter(lambda schema: isinstance(schema, dict)),
                "strict": st.booleans(),
                "description": st.text(max_size=5),
            },
        )
    }
)


@given(
    tools=st.lists(TOOLS, max_size=3),
    choice=st.none()
    | st.sampled_from(["auto", "none", "required", "nonsense"])
    | NAMES.map(lambda name: {"function": {"name": name}}),
    is_parallel=st.none() | st.booleans(),
    family=st.none() | st.sampled_from(sorted(PARSERS)),
    alone=st.none() | SCHEMAS,
)
async def test_tools_are_served_or_refused(
    tools: list[Any],
    choice: Any,
    is_parallel: bool | None,
    family: ToolFamily | None,
    alone: Any,
    grammars: Grammars,
) -> None:
    """Lists of tools with schemas of all kinds, by every family's words, also beside a schema."""
    asked = None if alone is None else Structure(kind="json_schema", value=alone, param="tools")
    wanted = msgspec.convert(choice, str | NamedTool | None)
    structure = None
    with contextlib.suppress(InvalidRequest):
        use = tool_use(msgspec.convert(tools, list[ToolBody]), wanted, is_parallel)
        structure = use and use.structure(family, asked)
    grammar = await served(grammars, structure) if structure else None
    event("no grammar" if structure is None else "refused" if grammar is None else "served")
    if grammar is not None:
        assert not matcher(byte_tokenizer_once(), grammar).is_error()


CALLS = {
    "hermes": ('<tool_call>{"name": ', ', "arguments": ', "}</tool_call>"),
    "llama3": ('{"name": ', ', "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": ', ', "arguments": ', "}]"),
    "pythonic": ("[", "(b=", ")]"),
    "qwen3_coder": ("<tool_call><function=", "><parameter=b>", "</parameter></function>"),
    "seed_oss": ("<seed:tool_call><function=", "><parameter=b>", "</parameter></function>"),
    "minimax_m2": ('<invoke name="', '"><parameter name="b">', "</parameter></invoke>"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    "harmony": ("<|channel|>commentary to=functions.", "<|message|>", "<|call|>"),
    "glm45": ("<tool_call>", "<arg_key>b</arg_key><arg_value>", "</arg_value></tool_call>"),
}
ODD = st.sampled_from(["NaN", "-Infinity", r'"\ud800"', r'"\q"', '"\n"', "1e999", "{[]: 1}", "1j"])


def _told(family: ToolFamily) -> st.SearchStrategy[str]:
    """A call with one part or another that is none: of a model that has half forgotten how."""
    begin, middle, end = (st.just(part) | st.sampled_from(["", ",", " "]) for part in CALLS[family])
    value = JSON.map(json.dumps) | ODD
    name = st.just('"a"' if family in ("hermes", "llama3", "mistral") else "a")
    return st.tuples(begin, name | value, middle, value, end).map("".join)


@pytest.mark.parametrize("family", PARSERS)
@given(data=st.data())
def test_whatever_a_model_writes_is_text_or_calls_that_can_be_sent(
    family: ToolFamily, data: st.DataObject
) -> None:
    """No text fails in a parser, in one piece or in two, and what it says has UTF-8."""
    text = data.draw(_told(family))
    cut = data.draw(st.integers(0, len(text)))
    for pieces in ([text], [text[:cut], text[cut:]]):
        parser = PARSERS[family]({"a": {"properties": {"b": {"type": "array"}}}})
        said = [one for piece in pieces for one in parser.feed(piece)] + parser.finish()
        for one in said:
            one.text.encode()
