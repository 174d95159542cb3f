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
from importlib import metadata
from typing import Any

from shared.errors import InvalidRequest

OLDEST = (1, 8)
"""vLLM brings an older one along, with which JSON may have spaces without end."""

INSTALL = 'pip install --no-deps "llguidance>=1.8,<2"'

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


@cache
def library() -> Any:
    """Return llguidance. Raises InvalidRequest: see ``release``."""
    release()
    return importlib.import_module("llguidance")


def release() -> str:
    """Return the installed release. Raises InvalidRequest: there is none, or too old a one."""
    try:
        found = metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        found = ""
    if found and tuple(map(int, found.split(".")[:2])) >= OLDEST:
        return found
    fault = f"{found} allows other answers than {OLDEST[0]}.{OLDEST[1]}" if found else "is missing"
    raise InvalidRequest(
        f"no answer can be held to a grammar here: llguidance {fault}; {INSTALL}",
        code="unsupported",
    )


@cache
def _limits() -> Any:
    return library().LLParserLimits(**_LIMITS)


def matcher(tokenizer: Any, grammar: str) -> Any:
    """Return the state of a grammar before the first token, or one that ``is_error``.

    tokenizer: an ``LLTokenizer``. Takes 0.3 ms, of large grammars a few hundred; holds no lock.
    """
    return library().LLMatcher(tokenizer, grammar, limits=_limits(), log_level=0)
