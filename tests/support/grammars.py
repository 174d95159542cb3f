"""What tests of grammars share: whether there is the library, and a check without a process."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest

from services.gateway.text.grammar_process import Verdict, byte_tokenizer, verdict_of
from services.gateway.text.grammars import Kind, Structure, text_of

HAS_LIBRARY = importlib.util.find_spec("llguidance") is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="llguidance is not installed")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
"""A schema whose answers end soon, whatever a model thinks of it."""


def check_in_place(grammar: str) -> Verdict:
    """What the gateway's process would say, at once: for virtual time."""
    return verdict_of(grammar, byte_tokenizer_once())


@cache
def byte_tokenizer_once() -> object:
    """The one tokenizer of bytes, for all tests."""
    return byte_tokenizer()


def a_grammar(value: Any, kind: Kind = "json_schema") -> str:
    """The text that engines read."""
    return text_of(Structure(kind=kind, value=value, param="f", whitespace=""))
