"""Calls of models that write them in their own ways as vLLM's parsers read them."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.calls.families import PARSERS
from shared.bounds import ToolFamily

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of what vLLM imports
]

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "is_on": {"type": "boolean"},
        "rows": {"type": "array"},
        "more": {"type": "object"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": ["integer", "string"]},
    },
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
NAMES = ("think", "tool_call", "arg_key", "arg_value", "seed:think", "seed:tool_call")
NAMES = (*NAMES, "minimax:tool_call")
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
MARKS = [*(f"<{begin}{name}>" for name in NAMES for begin in ("", "/")), *SECTION, *CALL]
TEXT = st.text(st.sampled_from(list("ab1é🦊<>/\"'\\{[\n\t ")) | st.characters(codec="utf-8"))
TEXT = TEXT.filter(lambda text: not re.search(r"</?\w+", text))  # a mark, where it is cut
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value, ensure_ascii=False))
VALUES = {
    "text": TEXT,
    "unit": TEXT,
    "count": st.integers().map(str),
    "share": st.integers(-(2**53), 2**53).map(str) | st.floats(-1e9, 1e9).map(str),
    "is_on": st.sampled_from(["true", "false", "True", "False"]),
    "rows": JSON.map(lambda value: f"[{value}]"),
    "more": JSON.map(lambda value: f'{{"a": {value}}}'),
    "note": TEXT | st.just("null"),
    "code": st.integers().map(str) | st.just("A1"),
}
CALLS = st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=2)


class Tokenizer:
    """What vLLM's parsers ask one for: marks that are tokens."""

    all_special_tokens, all_special_ids, chat_template = (), (), None

    def get_vocab(self) -> dict[str, int]:
        return {mark: index for index, mark in enumerate(MARKS)}

    def decode(self, token_ids: list[int]) -> str:
        return "".join(MARKS[one] for one in token_ids)


def written(family: ToolFamily, arguments: dict[str, str]) -> str:
    if family == "minimax_m2":
        begin, end = '<minimax:tool_call>\n<invoke name="f">\n', "</invoke>\n</minimax:tool_call>"
        parts = '<parameter name="{}">{}</parameter>\n'
    elif family == "seed_oss":
        begin, end = "<seed:tool_call>\n<function=f>\n", "</function>\n</seed:tool_call>"
        parts = "<parameter={}>\n{}\n</parameter>\n"
    elif family == "glm45":
        begin, end = "<tool_call>f\n", "</tool_call>"
        parts = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    else:
        begin, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
        parts = "<parameter={}>\n{}\n</parameter>\n"
    return begin + "".join(parts.format(*pair) for pair in arguments.items()) + end


def of_vllm(family: str, text: str) -> list[Any]:
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = import_module("vllm.tool_parsers").ToolParserManager
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    request = protocol.ChatCompletionRequest.model_validate(asked)
    parser = manager.get_tool_parser(family)(Tokenizer(), request.tools)
    calls = parser.extract_tool_calls(text, request).tool_calls
    return [json.loads(call.function.arguments) for call in calls]


def of_ours(family: ToolFamily, text: str, step: int) -> list[Any]:
    parser = PARSERS[family]({"f": PARAMETERS})
    said = [one for at in range(0, len(text), step) for one in parser.feed(text[at : at + step])]
    said += parser.finish()
    calls = [""] * parser.num_calls
    for one in said:
        if one.call >= 0:
            calls[one.call] += one.text
    return [json.loads(call) for call in calls]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "seed_oss", "minimax_m2"])
@given(calls=CALLS, step=st.integers(1, 20))
def test_calls_are_read_as_vllm_reads_them(
    family: ToolFamily, calls: list[dict[str, str]], step: int
) -> None:
    """By a tool's schema: any text, and JSON of every type; in pieces and at once."""
    text = "\n".join(written(family, arguments) for arguments in calls)
    assert of_ours(family, text, step) == of_vllm(family, text)


@given(calls=st.lists(st.dictionaries(TEXT, JSON), min_size=1, max_size=2), step=st.integers(1, 20))
def test_calls_of_deepseek_are_read_as_vllm_reads_them(
    calls: list[dict[str, str]], step: int
) -> None:
    """As V3.1 writes them, and as V3 does."""
    written = [json.dumps(arguments, ensure_ascii=False) for arguments in calls]
    begin, middle, end = CALL
    inner = "".join(f"{begin}f{middle}{arguments}{end}" for arguments in written)
    text = inner.join(SECTION)
    assert of_ours("deepseek_v3", text, step) == of_vllm("deepseek_v31", text)
    inner = "\n".join(
        f"{begin}function{middle}f\n```json\n{arguments}\n```{end}" for arguments in written
    )
    text = inner.join(SECTION)
    assert of_ours("deepseek_v3", text, step) == of_vllm("deepseek_v3", text)
