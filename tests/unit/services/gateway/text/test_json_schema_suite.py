"""The JSON Schema test suite, draft 2020-12: a schema is served exactly, or refused with its place.

What an answer may be is narrower than a schema in a few ways, which are listed here and in
docs/structured-output.md. It is never wider.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from services.gateway.text.grammar_process import byte_tokenizer
from services.gateway.text.grammars import Grammars, Structure
from shared.errors import InvalidRequest
from shared.grammar import matcher
from tests.support.grammars import check_in_place, needs_library

pytestmark = needs_library

SUITE = Path(__file__).parent / "json_schema_suite/draft2020-12.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in SUITE.read_text().splitlines()]

NARROWER = {
    "properties come in the schema's order": {
        ("allOf", "allOf"),
        ("allOf with base schema", "valid"),
        ("const with object", "same object with different property order is valid"),
    },
    "a number is written in one way": {
        ("const with 0 does not match other zero-like types", "float zero is valid"),
        ("const with 1 does not match true", "float one is valid"),
        ("const with -2.0 matches integer and float types", "float -2.0 is valid"),
        (
            "float and integers are equal up to 64-bit representation limits",
            "float is valid",
        ),
        ("enum with 0 does not match false", "float zero is valid"),
        ("enum with [0] does not match [false]", "[0.0] is valid"),
        ("enum with 1 does not match true", "float one is valid"),
        ("enum with [1] does not match [true]", "[1.0] is valid"),
        ("integer type matches integers", "a float with zero fractional part is an integer"),
    },
    "a format that is known is held": {
        (f"{kind} format", f"invalid {kind} string is only an annotation by default")
        for kind in (
            *("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid"),
            "duration",
        )
    },
}
"""Valid instances that no answer is: case, and test."""

REFUSED = {
    "$dynamicAnchor": 3,
    "$dynamicRef": 10,
    "$ref": 20,
    "$schema": 2,
    "bool": 1,
    "contains": 18,
    "dependentRequired": 4,
    "dependentSchemas": 7,
    "else": 2,
    "f": 7,
    "if": 17,
    "maxContains": 1,
    "maxItems": 1,
    "maxLength": 1,
    "maxProperties": 1,
    "minContains": 1,
    "minItems": 1,
    "minLength": 1,
    "minProperties": 1,
    "multipleOf": 1,
    "not": 11,
    "oneOf": 8,
    "patternProperties": 3,
    "propertyNames": 8,
    "then": 3,
    "unevaluatedItems": 22,
    "unevaluatedProperties": 34,
    "uniqueItems": 3,
}
"""How many schemas are refused, by the last step of the place that is told; f is the whole one."""


@cache
def _bytes() -> object:
    return byte_tokenizer()


def takes(grammar: str, value: Any) -> bool:
    """Whether a whole answer may be this value, written without spaces."""
    data = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    state = matcher(_bytes(), grammar)
    return state.try_consume_tokens(list(data)) == len(data) and state.is_accepting()


def a_structure(schema: Any) -> Structure:
    return Structure(kind="json_schema", value=schema, param="f", whitespace="")


async def test_what_is_served_is_served_exactly() -> None:
    """Valid instances are answers and invalid ones are none, but for those that are listed."""
    grammars = Grammars(check_in_place)
    narrower: set[tuple[str, str]] = set()
    counts: Counter[str] = Counter()
    for case in CASES:
        try:
            grammar = await grammars.checked(a_structure(case["schema"]))
        except InvalidRequest:
            counts["refused"] += 1
            continue
        counts["served"] += 1
        for test in case["tests"]:
            about = case["file"], case["description"], test["description"]
            taken = takes(grammar, test["data"])
            assert test["valid"] or not taken, about
            if test["valid"] and not taken:
                narrower.add(about[1:])
    grammars.close()
    assert narrower == set().union(*NARROWER.values())
    assert counts == {"served": 176, "refused": 192}


async def test_what_is_not_served_is_refused_with_its_place() -> None:
    """Each by one error, at the keyword; schemas that nothing matches as a whole."""
    grammars = Grammars(check_in_place)
    places: Counter[str] = Counter()
    for case in CASES:
        error = await _refusal(grammars, case["schema"])
        if error is None:
            continue
        assert error.code == "invalid_grammar"
        assert error.message.startswith(f"{error.param}: ")
        found: Any = case["schema"]
        path = error.param.replace("[", ".").replace("]", "").split(".")
        for step in path[1:]:
            found = found[int(step)] if isinstance(found, list) else found[step]
        places[path[-1]] += 1
    grammars.close()
    assert places == REFUSED


async def _refusal(grammars: Grammars, schema: Any) -> InvalidRequest | None:
    try:
        await grammars.checked(a_structure(schema))
    except InvalidRequest as error:
        return error
    return None
