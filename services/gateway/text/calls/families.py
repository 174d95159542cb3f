"""The ways in which models write calls of tools, by name, and which of them a model has."""

from __future__ import annotations

from typing import Literal

from services.gateway.text.calls.json_calls import (
    HermesParser,
    MistralParser,
    PythonicParser,
    WholeJsonParser,
)
from services.gateway.text.calls.parser import ToolParser
from services.gateway.text.calls.thoughts import ThoughtParser
from services.gateway.text.calls.xml_calls import GlmParser, QwenCoderParser

Family = Literal["hermes", "llama3", "mistral", "pythonic", "qwen3_coder", "glm45"]

PARSERS: dict[Family, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": WholeJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": QwenCoderParser,
    "glm45": GlmParser,
}

SHOWS_SPECIAL_TOKENS = frozenset[Family]({"llama3", "mistral", "pythonic"})
"""Families whose marks are special tokens, which answers do not show otherwise."""


def family_of(template: str | None) -> Family | None:
    """Return how a model writes calls, by the marks in its chat template; None = not at all."""
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder"
        return "glm45" if "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "func_name1(" in template or "<|python_start|>" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3"
    return None


def chosen_family(setting: str, template: str | None) -> Family | None:
    """Return how calls are written; setting: ``auto``, ``none``, or a family."""
    if setting == "auto":
        return family_of(template)
    return next((family for family in PARSERS if family == setting), None)


def chosen_thinking(setting: str, template: str | None) -> bool:
    """Return whether answers may think first; setting: ``auto``, ``none``, or ``think``."""
    if setting == "auto":
        return ThoughtParser.BEGIN in (template or "")
    return setting == "think"
