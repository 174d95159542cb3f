"""Calls found in text: every family, however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from services.gateway.text.tool_calls import (
    PARSERS,
    ListParser,
    NamedParser,
    Said,
    ThoughtParser,
    ToolParser,
    family_of,
)

NAMES = ("weather", "get_time")
PARIS = ("weather", {"city": 'Paris, "é" {[}'})
NOW = ("get_time", {})

Parser = ToolParser | ThoughtParser


def read(parser: Parser, text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Feed a text in pieces: thinking, text, calls."""
    said: list[Said] = []
    ends = [*sorted(cuts), len(text)]
    for start, stop in zip([0, *ends], ends, strict=False):
        said += parser.feed(text[start:stop])
    said += parser.finish()
    calls: list[tuple[str, str]] = []
    for one in said:
        if one.name:
            assert one.call == len(calls), "calls come one after the other"
            calls.append((one.name, ""))
        if one.call >= 0:
            name, arguments = calls[one.call]
            calls[one.call] = name, arguments + one.text
    thought = "".join(one.text for one in said if one.is_thought)
    words = "".join(one.text for one in said if one.call < 0 and not one.is_thought)
    assert parser.num_calls == len(calls)
    return thought, words, calls


def require(make: Callable[[], Parser], text: str, words: str, due: list[Any]) -> None:
    """The same whole, character by character, and in random pieces."""
    source = random.Random(text)
    ways = [[], list(range(len(text)))]
    ways += [sorted(source.choices(range(len(text) + 1), k=4)) for _ in range(30)]
    for cuts in ways:
        _, said, calls = read(make(), text, cuts)
        assert said == words, cuts
        assert [(name, json.loads(arguments)) for name, arguments in calls] == due, cuts


def hermes(name: str, arguments: Any, key: str = "arguments") -> str:
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


CALL = json.dumps({"name": PARIS[0], "parameters": PARIS[1]}, ensure_ascii=False)
LIST = json.dumps(
    [{"name": name, "arguments": arguments} for name, arguments in (PARIS, NOW)],
    ensure_ascii=False,
)


@pytest.mark.parametrize(
    ("family", "text", "words", "due"),
    [
        ("hermes", hermes(*PARIS), "", [PARIS]),
        ("hermes", f"I look. {hermes(*PARIS)}\n{hermes(*NOW)}", "I look. ", [PARIS, NOW]),
        ("hermes", hermes(*PARIS)[: -len("</tool_call>")], "", [PARIS]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "get_time"}</tool_call>', "", [NOW]),
        ("hermes", "no call <tool_cal> at all <", "no call <tool_cal> at all <", []),
        ("hermes", hermes("nobody", {}), hermes("nobody", {}), []),
        ("hermes", "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
        ("llama3", CALL, "", [PARIS]),
        ("llama3", f"<|python_tag|>{CALL}; {CALL}", "", [PARIS, PARIS]),
        ("llama3", "The weather {is} fine.", "The weather {is} fine.", []),
        ("llama3", '{"a": 1}', '{"a": 1}', []),
        (
            "llama3",
            '{"name": "nobody", "parameters": {}}',
            '{"name": "nobody", "parameters": {}}',
            [],
        ),
        ("llama3", CALL[:-3], CALL[:-3], []),
        ("mistral", f"[TOOL_CALLS]{LIST}", "", [PARIS, NOW]),
        ("mistral", f"I look.[TOOL_CALLS] {LIST}", "I look.", [PARIS, NOW]),
        (
            "mistral",
            '[TOOL_CALLS]weather{"city": "x"}[TOOL_CALLS]get_time[ARGS]{}',
            "",
            [("weather", {"city": "x"}), NOW],
        ),
        ("mistral", "[TOOL_CALLS]nonsense", "[TOOL_CALLS]nonsense", []),
        ("mistral", "a [list] of words [TOOL", "a [list] of words [TOOL", []),
        ("pythonic", '[weather(city="Paris, \\"é\\" {[}"), get_time()]', "", [PARIS, NOW]),
        ("pythonic", "<|python_start|>[get_time()]<|python_end|>", "", [NOW]),
        (
            "pythonic",
            "[weather(city=1, days=[1, 2], on={'a': True})]",
            "",
            [("weather", {"city": 1, "days": [1, 2], "on": {"a": True}})],
        ),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[nobody()]", "[nobody()]", []),
        ("pythonic", "[get_time(__import__('os'))]", "[get_time(__import__('os'))]", []),
        ("pythonic", "[get_time(a={1, 2})]", "[get_time(a={1, 2})]", []),
        ("pythonic", "words", "words", []),
    ],
)
def test_a_family(family: Any, text: str, words: str, due: list[Any]) -> None:
    """Calls, the text round them, and what is none."""
    require(lambda: PARSERS[family](NAMES), text, words, due)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": ["get_time"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get\ntime", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": NaN, "name": "get_time"}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": 1e999}]'),
        ("llama3", '{"name": {}, "parameters": {}}'),
        ("llama3", '{"name": "get_time", "parameters": {"at": Infinity}}'),
        ("mistral", '[TOOL_CALLS][{"name": ["get_time"], "arguments": {}}]'),
        ("pythonic", "[get_time(at={[]: 1})]"),
        ("pythonic", "[get_time(at={(1, 2): 1})]"),
        ("pythonic", "[get_time(at=1e999)]"),
        ("pythonic", "[get_time(at=1j)]"),
        ("pythonic", "[get_time(**{'at': 1})]"),
    ],
)
def test_what_only_looks_like_a_call_is_text(family: Any, text: str) -> None:
    """Names that are none, numbers and keys that JSON does not have, arguments without a name."""
    require(lambda: PARSERS[family](NAMES), text, text, [])


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        (
            "hermes",
            r'<tool_call>{"arguments": {"at": "\ud83d"}, "name": "get_time"}</tool_call>',
            ...,
        ),
        ("llama3", r'{"name": "get_time", "parameters": {"at": "\ud83d"}}', ...),
        ("pythonic", r"[get_time(at='\ud83d')]", ...),
        ("llama3", '{"name": "get_time", "parameters": null}', {}),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', {}),
    ],
)
def test_arguments_can_always_be_sent(family: Any, text: str, arguments: Any) -> None:
    """Half a character of UTF-16 stays an escape; no arguments are an empty object."""
    due = {"at": "\ud83d"} if arguments is ... else arguments
    require(lambda: PARSERS[family](NAMES), text, "", [("get_time", due)])
    _, _, [(_, said)] = read(PARSERS[family](NAMES), text, [])
    said.encode()


def test_arguments_leave_as_they_come() -> None:
    """A client sees the name first, and arguments before the call is over."""
    parser = PARSERS["hermes"](NAMES)
    said = parser.feed('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa')
    assert [(one.name, one.text) for one in said] == [("weather", ""), ("", '{"city": "Pa')]
    assert parser.feed("ris")[0].text == "ris"


def test_the_list_of_a_required_call() -> None:
    """As the grammar makes it, with any spaces; a call that was cut off keeps what there is."""
    require(lambda: ListParser(NAMES), LIST, "", [PARIS, NOW])
    spaced = '[\n {"name" : "get_time" , "parameters" :\n{ } \n}\n ]'
    require(lambda: ListParser(NAMES), spaced, "", [NOW])
    _, _, calls = read(ListParser(NAMES), LIST[:40], [])
    assert calls[0][0] == "weather"


def test_a_named_call_is_its_arguments() -> None:
    """The whole answer."""
    require(lambda: NamedParser(["weather"]), json.dumps(PARIS[1]), "", [PARIS])


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "words"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("why </think>so", True, "why", "so"),
        ("so", False, "", "so"),
        ("<thin air", False, "", "<thin air"),
        ("a < b <think> x </think>", False, "", "a < b <think> x </think>"),
        ("why not </thin", True, "why not </thin", ""),
        ("<think></think>so", False, "", "so"),
    ],
)
def test_thinking(text: str, is_open: bool, thought: str, words: str) -> None:
    """At the beginning of an answer, or begun by the prompt; however it is cut."""
    for cuts in ([], list(range(len(text))), [3], [8, 9]):
        got = read(ThoughtParser(None, is_open=is_open), text, cuts)
        assert got == (thought, words, []), cuts


def test_calls_after_thinking() -> None:
    """What looks like a call within a thought is none."""
    text = f"<think>maybe {hermes(*NOW)}</think>{hermes(*PARIS)}"
    parser = ThoughtParser(PARSERS["hermes"](NAMES), is_open=False)
    thought, words, calls = read(parser, text, [10, 50])
    assert (thought, words) == (f"maybe {hermes(*NOW)}", "")
    assert [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', "llama3"),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>", None),
        ("{{ tools }}<tool_call>f\n<arg_key>a</arg_key>", None),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_family_of_a_template(template: str | None, family: str | None) -> None:
    """By its marks; a template that never mentions tools has none."""
    assert family_of(template) == family
