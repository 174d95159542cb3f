"""The ways in which models write calls of tools and thinking, by name, and which of them a model
has."""

from __future__ import annotations

from services.gateway.text.calls.harmony import HARMONY, HarmonyParser
from services.gateway.text.calls.json_calls import (
    HermesParser,
    MistralParser,
    PythonicParser,
    WholeJsonParser,
)
from services.gateway.text.calls.parser import ToolParser
from services.gateway.text.calls.section_calls import DeepSeekParser
from services.gateway.text.calls.thoughts import THINK, ThoughtMarks
from services.gateway.text.calls.xml_calls import (
    GlmParser,
    MiniMaxParser,
    QwenCoderParser,
    SeedParser,
)
from shared.bounds import ThoughtName, ToolFamily

PARSERS: dict[ToolFamily, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": WholeJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": QwenCoderParser,
    "glm45": GlmParser,
    "seed_oss": SeedParser,
    "minimax_m2": MiniMaxParser,
    "deepseek_v3": DeepSeekParser,
    "harmony": HarmonyParser,
}

SHOWS_SPECIAL_TOKENS = frozenset[ToolFamily](
    {"llama3", "mistral", "pythonic", "seed_oss", "deepseek_v3"}
)
"""Families whose marks are special tokens, which answers do not show otherwise; Harmony's are shown
without tools, too."""

THOUGHTS: dict[ThoughtName, ThoughtMarks] = {
    "think": THINK,
    "mistral": ThoughtMarks("[THINK]", "[/THINK]", are_special=True),
    "seed_oss": ThoughtMarks("<seed:think>", "</seed:think>", are_special=True),
    "harmony": HARMONY,
}


def family_of(template: str | None) -> ToolFamily | None:
    """Return how a model writes calls, by the marks in its chat template; None = not at all."""
    if template is None or "tools" not in template:
        return None
    if HARMONY.begin in template:
        return "harmony"
    if "<seed:tool_call>" in template:
        return "seed_oss"
    if "<minimax:tool_call>" in template:
        return "minimax_m2"
    if DeepSeekParser.BEGIN in template:
        return "deepseek_v3"
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


def chosen_family(setting: str, template: str | None) -> ToolFamily | None:
    """Return how calls are written; setting: ``auto``, ``none``, or a family."""
    if setting == "auto":
        return family_of(template)
    return next((family for family in PARSERS if family == setting), None)


def chosen_thinking(setting: str, template: str | None) -> ThoughtMarks | None:
    """Return what stands around thinking, None = answers do not think; setting: ``auto``,
    ``none``, or a name of ``THOUGHTS``."""
    if setting == "auto":
        found = (marks for marks in THOUGHTS.values() if marks.begin in (template or ""))
        return next(found, None)
    return next((marks for name, marks in THOUGHTS.items() if name == setting), None)
