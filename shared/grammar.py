"""The library that holds answers to a grammar, and the bounds of what it is given; both ends see it
through this page alone.

A grammar is one text (``SamplingParams.grammar``) that the gateway writes and checks and that
engines turn into masks: Lark's, or JSON that holds a JSON schema, as llguidance reads it
(docs/adr/0014-grammars.md). Its state is a function of the grammar and the answer's tokens, so
whoever has both can go on.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from shared.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 << 10
"""Longest grammar in a message."""

_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""The library's own bounds: of a grammar's regular expressions, of one mask (about 15 ms), of
states (about 100 MB), of rules."""


def library() -> Any:
    """Return llguidance. Raises InvalidRequest: it is not installed here."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise InvalidRequest(
            "no answer can be held to a grammar here: llguidance is not installed (it comes with "
            "pdmesh: pip install llguidance)",
            code="unsupported",
        ) from None


@cache
def _limits() -> Any:
    return library().LLParserLimits(**_LIMITS)


def matcher(tokenizer: Any, grammar: str) -> Any:
    """Return the state of a grammar before the first token, or one that ``is_error``.

    tokenizer: an ``LLTokenizer``. Takes 0.3 ms, of large grammars a few hundred; holds no lock.
    """
    return library().LLMatcher(tokenizer, grammar, limits=_limits(), log_level=0)
