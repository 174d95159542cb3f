"""What an answer shall match, as clients of OpenAI, vLLM and SGLang say it: the fields, and the one
structure that they ask for.

Several spellings of one wish are known, and one request has one wish: two are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from services.gateway import limits
from services.gateway.front import field_rules as fields
from services.gateway.http.unserved_fields import UnservedFields, unsupported
from services.gateway.text.grammars import MAX_CHOICES, Kind, Structure, one_wish, parsed_json

MAX_TAGS = 512
"""Tags of a structure, and triggers: each of the ones is looked for among all of the others."""
_AT_MOST = fields.rule(maxItems=MAX_TAGS)

JsonSchema = Annotated[
    dict[str, Any] | bool | str, fields.rule("A JSON schema, or its text.", minProperties=0)
]
Choices = Annotated[
    list[Annotated[str, fields.rule(minLength=1)]],
    fields.rule("The answer is one of them.", minItems=1, maxItems=MAX_CHOICES),
]


class NamedSchema(msgspec.Struct, rename={"schema_": "schema"}):
    """OpenAI's: a schema and its name. strict: every answer matches, whatever it says."""

    name: str | None = None
    schema_: JsonSchema | None = None
    strict: bool | None = None
    description: str | None = None


class TaggedStructure(msgspec.Struct, rename={"schema_": "schema"}):
    """A part of an answer between two texts that matches a schema."""

    begin: str
    end: str
    schema_: JsonSchema | None = None


class TagContent(msgspec.Struct):
    """What stands within a tag of a ``TagFormat``."""

    type: Annotated[str, fields.rule(const="json_schema")]
    json_schema: JsonSchema | None = None


class FormatTag(msgspec.Struct):
    """A tag of a ``TagFormat``."""

    begin: str
    content: TagContent
    end: str


class TagFormat(msgspec.Struct):
    """The newer way to write a structural tag, xgrammar's."""

    type: Annotated[str, fields.rule(enum=["json_schema", "regex", "grammar", "triggered_tags"])]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None
    triggers: Annotated[list[str], _AT_MOST] | None = None
    tags: Annotated[list[FormatTag], _AT_MOST] | None = None
    at_least_one: Annotated[bool, fields.rule(const=False)] = False
    stop_after_first: Annotated[bool, fields.rule(const=False)] = False


class ResponseFormat(msgspec.Struct, rename={"schema_": "schema"}):
    """OpenAI's, with SGLang's and vLLM's ``structural_tag``, and llama.cpp's ``schema`` where
    OpenAI's has none."""

    type: Annotated[
        str, fields.rule(enum=["text", "json_object", "json_schema", "structural_tag"])
    ] = "text"
    json_schema: NamedSchema | None = None
    structures: Annotated[list[TaggedStructure], _AT_MOST] | None = None
    triggers: Annotated[list[str], _AT_MOST] | None = None
    format: TagFormat | None = None
    schema_: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(UnservedFields, kw_only=True):
    """Bodies that have all spellings; they have one line of ancestors."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


STRUCTURED = tuple(
    name
    for name in StructuredFields.__struct_fields__
    if name not in UnservedFields.__struct_fields__
)


def structure_of(body: StructuredFields) -> Structure | None:
    """Return what the answer shall match; None = anything. Raises InvalidRequest: two wishes, or
    one that is no wish of its kind."""
    return one_wish(list(_wishes(body)))


def _wishes(body: StructuredFields) -> Iterator[Structure]:
    format_ = body.response_format
    if format_ is not None:
        if format_.format is not None and format_.type != "structural_tag":
            raise unsupported("response_format.format", "needs the type structural_tag")
        if format_.type != "text":
            yield _formatted(format_)
    outputs = body.structured_outputs
    if outputs is not None:
        yield from _structured(outputs)
    spaces = body.guided_whitespace_pattern
    if body.guided_json is not None:
        yield _json(body.guided_json, "guided_json", spaces)
    if body.json_schema is not None:
        yield _json(body.json_schema, "json_schema")
    values: tuple[tuple[Kind, str, Any], ...] = (
        ("regex", "guided_regex", body.guided_regex),
        ("grammar", "guided_grammar", body.guided_grammar),
        ("regex", "regex", body.regex),
        ("grammar", "ebnf", body.ebnf),
        ("choice", "guided_choice", body.guided_choice),
    )
    for kind, name, value in values:
        if value is not None:
            yield Structure(kind=kind, value=value, param=name)
    if body.structural_tag is not None:
        yield _tags_of_text(body.structural_tag, "structural_tag")


def _formatted(asked: ResponseFormat) -> Structure:
    match asked.type:
        case "json_object" | "json_schema" if asked.schema_ is not None and not asked.json_schema:
            return _json(asked.schema_, "response_format.schema")
        case "json_object":
            return _json({"type": "object"}, "response_format")
        case "json_schema":
            named = asked.json_schema
            if named is None or named.schema_ is None:
                raise limits.refusal("response_format.json_schema.schema", "is required")
            return _json(named.schema_, "response_format.json_schema.schema")
        case "structural_tag":
            return _structural_tag(asked, "response_format")
        case _:
            raise limits.refusal(
                "response_format.type",
                "must be text, json_object, json_schema or structural_tag",
                code="unsupported",
            )


def _structured(asked: StructuredOutputs) -> Iterator[Structure]:
    spaces = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    name = "structured_outputs."
    if asked.json is not None:
        yield _json(asked.json, name + "json", spaces)
    if asked.json_object:
        yield _json({"type": "object"}, name + "json_object", spaces)
    kinds: tuple[Kind, ...] = ("regex", "grammar", "choice")
    for kind in kinds:
        if (value := getattr(asked, kind)) is not None:
            yield Structure(kind=kind, value=value, param=name + kind)
    if asked.structural_tag is not None:
        yield _tags_of_text(asked.structural_tag, name + "structural_tag")


def _json(schema: dict[str, Any] | bool | str, param: str, spaces: str | None = None) -> Structure:
    value = parsed_json(schema, param) if isinstance(schema, str) else schema
    return Structure(kind="json_schema", value=value, param=param, whitespace=spaces)


def _tags_of_text(text: str, param: str) -> Structure:
    try:
        asked = msgspec.json.decode(text, type=ResponseFormat)
    except (msgspec.DecodeError, RecursionError):
        raise limits.refusal(param, "must be a structural tag, as JSON text") from None
    return _structural_tag(asked, param)


def _structural_tag(asked: ResponseFormat, param: str) -> Structure:
    if asked.format is not None:
        return _tag_format(asked.format, f"{param}.format")
    parts = [
        (f"{param}.structures[{index}]", "schema", one)
        for index, one in enumerate(asked.structures or ())
    ]
    return _tags(parts, asked.triggers or (), param)


def _tag_format(asked: TagFormat, place: str) -> Structure:
    match asked.type:
        case "json_schema":
            schema = True if asked.json_schema is None else asked.json_schema
            return _json(schema, f"{place}.json_schema")
        case "regex":
            return Structure(kind="regex", value=asked.pattern, param=f"{place}.pattern")
        case "grammar":
            return Structure(kind="grammar", value=asked.grammar, param=f"{place}.grammar")
        case "triggered_tags":
            pass
        case _:
            raise unsupported(
                f"{place}.type", "must be json_schema, regex, grammar or triggered_tags"
            )
    for name in ("at_least_one", "stop_after_first"):
        if getattr(asked, name):
            raise unsupported(f"{place}.{name}", "tags may come any number of times")
    parts: list[tuple[str, str, TaggedStructure]] = []
    for index, tag in enumerate(asked.tags or ()):
        if tag.content.type != "json_schema":
            raise unsupported(f"{place}.tags[{index}].content.type", "must be json_schema")
        part = TaggedStructure(tag.begin, tag.end, tag.content.json_schema)
        parts.append((f"{place}.tags[{index}]", "content.json_schema", part))
    return _tags(parts, asked.triggers or (), place)


def _tags(
    parts: Sequence[tuple[str, str, TaggedStructure]], triggers: Sequence[str], param: str
) -> Structure:
    """parts: each with its place, and the name of its schema there."""
    if not parts or not triggers:
        raise unsupported(param, "a structural tag needs tags and triggers")
    limits.checked_count(len(parts), MAX_TAGS, param=param, what="tags")
    limits.checked_count(len(triggers), MAX_TAGS, param=f"{param}.triggers", what="triggers")
    tags: list[Mapping[str, Any]] = []
    places: dict[str, str] = {}
    for index, (place, name, part) in enumerate(parts):
        trigger = next((one for one in triggers if one and part.begin.startswith(one)), None)
        if trigger is None:
            raise limits.refusal(f"{place}.begin", "must start with one of the triggers")
        schema = True if part.schema_ is None else part.schema_
        if isinstance(schema, str):
            schema = parsed_json(schema, f"{place}.{name}")
        places[f"[{index}].schema"] = f"{place}.{name}"
        tags.append({"trigger": trigger, "begin": part.begin, "schema": schema, "end": part.end})
    return Structure(kind="tags", value=tags, param=param, places=places)
