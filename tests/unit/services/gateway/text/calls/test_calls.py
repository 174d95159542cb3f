"""Calls found in text: every family, however the text is cut into pieces."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.gateway.text.calls.families import PARSERS, family_of
from services.gateway.text.calls.harmony import HarmonyParser, call_header
from services.gateway.text.calls.parser import ListParser, NamedParser, Said, ToolParser
from services.gateway.text.calls.thoughts import ThoughtParser
from services.gateway.text.chat_template import ChatTemplate, Rendering
from shared.model_folder import SpecialTokens

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "least": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "is_long": {"type": "boolean"},
        "at": {"$ref": "#/$defs/at"},
        "on": {"type": "object"},
        "unit": {"enum": ["C", "F"]},
        "note": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer"]},
    },
    "$defs": {"at": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = {"weather": SCHEMA, "get_time": {"type": "object"}}
PARIS = ("weather", {"city": 'Paris, "é" {[}'})
NOW = ("get_time", {})

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"

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


DEEPSEEK_ENDS = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek(*calls: tuple[str, Any]) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    inner = "".join(
        f"{begin}{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}{end}"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_r1(*calls: tuple[str, Any]) -> str:
    begin, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"
    inner = "\n".join(
        f"{begin}{name}\n```json\n{json.dumps(arguments)}{end}" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


MARKED = ("get_time", {"at": "</tool_call>, <tool_call> and </tool_call>"})
NAME_LAST = json.dumps({"arguments": MARKED[1], "name": MARKED[0]})
NAME_LAST = f"<tool_call>\n{NAME_LAST}\n</tool_call>"
UNCLOSED = '<tool_call>{"name: "get_time"}</tool_call>'
MANY_MARKS = '<tool_call>{"' + "</tool_call>" * 20
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
        ("hermes", hermes(*PARIS)[: -len("</tool_call>")] + hermes(*NOW), "", [PARIS, NOW]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "get_time"}</tool_call>', "", [NOW]),
        ("hermes", f"{NAME_LAST} {NAME_LAST}", "", [MARKED, MARKED]),
        ("hermes", NAME_LAST[: -len("</tool_call>")], "", [MARKED]),
        ("hermes", f"{UNCLOSED}\n{hermes(*NOW)}", f"{UNCLOSED}\n", [NOW]),
        ("hermes", f"{UNCLOSED} and so on", f"{UNCLOSED} and so on", []),
        ("hermes", MANY_MARKS + hermes(*NOW), MANY_MARKS, [NOW]),
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
        (
            "mistral",
            '[TOOL_CALLS]weather{"city": "[TOOL_CALLS]x"} [TOOL_CALLS]get_time{}',
            "",
            [("weather", {"city": "[TOOL_CALLS]x"}), NOW],
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
        ("deepseek_v3", deepseek(PARIS, NOW), "", [PARIS, NOW]),
        ("deepseek_v3", deepseek_r1(PARIS, NOW), "", [PARIS, NOW]),
        ("deepseek_v3", f"I look. {deepseek(NOW)} Done.", "I look.  Done.", [NOW]),
        ("deepseek_v3", deepseek(PARIS).removesuffix(DEEPSEEK_ENDS), "", [PARIS]),
        ("deepseek_v3", deepseek(("nobody", {})), deepseek(("nobody", {})), []),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>words", "<｜tool▁calls▁begin｜>words", []),
        ("deepseek_v3", "a <｜tool▁call <", "a <｜tool▁call <", []),
        ("harmony", "<|channel|>final<|message|>Fine.", "Fine.", []),
        ("harmony", "<|channel|>final<|message|>Fine <|end|>", "Fine ", []),
        ("harmony", call_header("weather") + json.dumps(PARIS[1]), "", [PARIS]),
        (
            "harmony",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather"
            f"<|channel|>commentary json<|message|> {json.dumps(PARIS[1])}<|call|>",
            "I look.",
            [PARIS],
        ),
        (
            "harmony",
            f"{call_header('get_time')}{{}}<|call|><|start|>assistant{call_header('get_time')}{{}}"
            "<|start|>assistant<|channel|>final<|message|>Now.<|channel|>final<|message|>Then.",
            "Now.\nThen.",
            [NOW, NOW],
        ),
        (
            "harmony",
            f"{call_header('nobody')}{{}}<|call|>",
            f"{call_header('nobody')}{{}}<|call|>",
            [],
        ),
        ("harmony", f"{call_header('get_time')}now", f"{call_header('get_time')}now", []),
        ("harmony", "<|channel|>final<|message|>a <|b> <|end", "a <|b> <|end", []),
        ("harmony", '{"a": 1}', '{"a": 1}', []),
        ("harmony", "to be", "to be", []),
        ("harmony", "<|channel|>final<|message|>A.<|end|><|start|>assistant<|chan", "A.", []),
    ],
)
def test_a_family(family: Any, text: str, words: str, due: list[Any]) -> None:
    """Calls, the text round them, and what is none."""
    require(lambda: PARSERS[family](TOOLS), text, words, due)


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
    require(lambda: PARSERS[family](TOOLS), text, text, [])


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
        ("hermes", hermes("get_time", None), {}),
        ("hermes", hermes("get_time", ""), {}),
        ("hermes", hermes("get_time", '{"at": "now"}'), {"at": "now"}),
    ],
)
def test_arguments_can_always_be_sent(family: Any, text: str, arguments: Any) -> None:
    """Half a character of UTF-16 stays an escape; no arguments are an empty object; an object that
    was written as text is that object."""
    due = {"at": "\ud83d"} if arguments is ... else arguments
    require(lambda: PARSERS[family](TOOLS), text, "", [("get_time", due)])
    _, _, [(_, said)] = read(PARSERS[family](TOOLS), text, [])
    said.encode()


@pytest.mark.parametrize(
    ("family", "begin"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPa"),
        ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city">Pa'),
        ("deepseek_v3", deepseek(("weather", {"city": "Pa"})).removesuffix('"}' + DEEPSEEK_ENDS)),
        ("harmony", call_header("weather") + '{"city": "Pa'),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa"),
    ],
)
def test_arguments_leave_as_they_come(family: Any, begin: str) -> None:
    """A client sees the name first, and arguments before the call is over."""
    parser = PARSERS[family](TOOLS)
    said = parser.feed(begin)
    assert [one.name for one in said if one.name] == ["weather"]
    assert "".join(one.text for one in said) == '{"city": "Pa'
    assert parser.feed("ris")[0].text == "ris"


def qwen(name: str, *values: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, *values: tuple[str, str]) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def seed(name: str, *values: tuple[str, str]) -> str:
    return qwen(name, *values).replace("tool_call>", "seed:tool_call>")


def minimax(name: str, *values: tuple[str, str]) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values)
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


XML = [("qwen3_coder", qwen), ("seed_oss", seed), ("minimax_m2", minimax), ("glm45", glm)]
QWEN_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n"
    "{{ value | string if value is not mapping and value is not sequence or value is string "
    "else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}{% endfor %}"
)
GLM_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function.name }}\n{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else "
    "value | tojson(ensure_ascii=False) }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("written", "due"),
    [
        ({"city": "Paris"}, {"city": "Paris"}),
        ({"city": '"é" {[}\\\t🦊'}, {"city": '"é" {[}\\\t🦊'}),
        (
            {"city": "a < b </para> <arg>\n\n  if (x<y)"},
            {"city": "a < b </para> <arg>\n\n  if (x<y)"},
        ),
        ({"city": "12", "unit": "C"}, {"city": "12", "unit": "C"}),
        ({"city": "null"}, {"city": "null"}),
        ({"city": ""}, {"city": ""}),
        ({"city": "  spaced\n"}, {"city": "  spaced\n"}),
        ({"days": "3", "least": "-1.50", "is_long": "true"}, ...),
        ({"least": "4"}, {"least": 4}),
        ({"least": "null", "note": "null"}, {"least": None, "note": None}),
        ({"is_long": "True", "least": "None"}, {"is_long": True, "least": None}),
        ({"at": '["a", "é"]', "on": '{"a": {"b": [1, null]}}'}, ...),
        ({"at": "['a']", "on": "{'a': True}"}, {"at": ["a"], "on": {"a": True}}),
        ({"days": "three", "at": "[1,", "on": "NaN"}, {"days": "three", "at": "[1,", "on": "NaN"}),
        ({"code": "12", "note": "12"}, {"code": 12, "note": "12"}),
        ({"code": "12a", "note": '"quoted"'}, {"code": "12a", "note": '"quoted"'}),
        ({"days": "1" * 5000}, {"days": "1" * 5000}),
    ],
)
@pytest.mark.parametrize(("family", "call"), XML)
def test_values_by_their_schema(family: Any, call: Any, written: dict[str, str], due: Any) -> None:
    """Text where a string is wanted, to the letter; else JSON, or what Python writes for it."""
    if due is ...:
        due = {key: json.loads(value) for key, value in written.items()}
    text = call("weather", *written.items())
    require(lambda: PARSERS[family](TOOLS), text, "", [("weather", due)])


@pytest.mark.parametrize(
    ("family", "call", "due"),
    [
        ("qwen3_coder", qwen, {"zone": "7", "at": "x"}),
        ("minimax_m2", minimax, {"zone": "7", "at": "x"}),
        ("glm45", glm, {"zone": 7, "at": "x"}),
    ],
)
def test_values_that_no_schema_knows(family: Any, call: Any, due: Any) -> None:
    """As the models' own parsers have it: text, or JSON where it is some."""
    text = call("get_time", ("zone", "7"), ("at", "x"))
    require(lambda: PARSERS[family](TOOLS), text, "", [("get_time", due)])
    more = {"get_time": {"additionalProperties": {"type": "integer"}}}
    require(lambda: PARSERS[family](more), text, "", [("get_time", {"zone": 7, "at": "x"})])


@pytest.mark.parametrize(("family", "call"), XML)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "additionalProperties": True},
        {"properties": {"a": {"type": {}}}},
        {"properties": {"a": {"anyOf": 5, "enum": 5, "$ref": "#a"}}},
        {"properties": {"a": {"$ref": "#/a/b"}}, "a": ["b"]},
        {
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}] * 50}},
        },
    ],
)
def test_values_of_an_odd_schema(family: Any, call: Any, schema: Any) -> None:
    """Of one that says nothing of a value that can be read, and soon."""
    text = call("get_time", ("a", "x"))
    require(lambda: PARSERS[family]({"get_time": schema}), text, "", [("get_time", {"a": "x"})])


class Branches(list[Any]):
    """Counts how often it is read."""

    num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize(("family", "call"), XML)
def test_a_schema_of_many_values_is_read_once(family: Any, call: Any) -> None:
    """A tool has room for ten thousands of branches, and the loop waits while they are read."""
    branches = Branches([{"type": "string"}])
    schema = {"additionalProperties": {"anyOf": branches}}
    text = call("get_time", ("a", "x"), ("b", "7"))
    said = PARSERS[family]({"get_time": schema}).feed(text)
    assert json.loads("".join(one.text for one in said)) == {"a": "x", "b": "7"}
    assert branches.num_reads == 1


@pytest.mark.parametrize(("family", "call"), XML)
def test_calls_between_marks(family: Any, call: Any) -> None:
    """Text before and after, several calls, none that there is; a call that is cut off."""
    one, two = call("weather", ("city", "Oslo"), ("days", "2")), call("get_time")
    due = [("weather", {"city": "Oslo", "days": 2}), NOW]

    def make() -> ToolParser:
        return PARSERS[family](TOOLS)

    require(make, f"I look. {one}\n{two}\nDone.", "I look. Done.", due)
    unknown = call("nobody", ("city", "Oslo"))
    require(make, f"{unknown} {two}", f"{unknown} ", [NOW])
    for text in ("<tool_call>", "<tool_call>no call</tool_call> x", "a <tool_cal> <", "<function>"):
        require(make, text, text, [])
    long = f"{PARSERS[family].BEGINS[0]}{'x' * 500}"  # type: ignore[attr-defined]
    assert make().feed(long), "what is no call does not wait for its end"
    require(make, long, long, [])
    for end in range(len(one)):
        parser = make()
        _, words, calls = read(parser, one[:end], [end // 2])
        assert one.startswith(words)
        assert not (words and calls)
        has_closed = PARSERS[family].CLOSES[0] in one[:end]  # type: ignore[attr-defined]
        assert parser.is_within_call == (bool(calls) and not has_closed)
        assert not calls or json.dumps(due[0][1]).startswith(calls[0][1])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
        (
            "qwen3_coder",
            "<function=weather><parameter=city>Oslo</parameter></function>\n</tool_call>",
        ),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>Oslo</function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</tool_call>"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=note>\nnull\n<parameter=city>\nOslo\n"
            "</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        ),
        (
            "glm45",
            r"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        ),
    ],
)
def test_marks_as_models_also_write_them(family: Any, text: str) -> None:
    """Without line ends, without the first mark, without a value's own end."""
    due = {"note": None, "city": "Oslo"} if "note" in text else {"city": "Oslo"}
    require(lambda: PARSERS[family](TOOLS), text, "", [("weather", due)])


@pytest.mark.parametrize("begin", ["", "a", "a </arg_key>"])
def test_spaces_without_end_are_read_at_once(begin: str) -> None:
    """Each token of a model that writes nothing else would hold up all other answers."""
    parser = PARSERS["glm45"]({"f": {}})
    parser.feed("<tool_call>f\n<arg_key>" + begin)
    began_at = time.process_time()
    parser.feed(" " * 2000)
    assert time.process_time() - began_at < 0.5


@pytest.mark.parametrize(
    ("make", "begin", "token"),
    [
        (PARSERS["hermes"], '<tool_call>{"name": "', "abcdefgh" * 8),
        (PARSERS["hermes"], '<tool_call>{"name": "get_time", "arguments": {}}', "abcdefgh" * 8),
        (PARSERS["llama3"], '\n{"name": "', "abcdefgh" * 8),
        (PARSERS["qwen3_coder"], "<tool_call><function=get_time>", "abcdefgh" * 8),
        (PARSERS["qwen3_coder"], "<tool_call><function=get_time><parameter=", "abcdefgh" * 8),
        (PARSERS["qwen3_coder"], "<tool_call><function=weather><parameter=on>", "abcdefgh" * 8),
        (PARSERS["glm45"], "<tool_call>get_time\n<arg_key>", "abcdefgh" * 8),
        (PARSERS["glm45"], "<tool_call>weather<arg_key>on</arg_key><arg_value>", "abcdefgh" * 8),
        (PARSERS["deepseek_v3"], "<｜tool▁calls▁begin｜>", "abcdefgh" * 8),
        (PARSERS["deepseek_v3"], deepseek(NOW).removesuffix(DEEPSEEK_ENDS), "abcdefgh" * 8),
        (PARSERS["harmony"], "<|start|>", "abcdefgh" * 8),
        (PARSERS["harmony"], call_header("get_time") + "{}", "abcdefgh" * 8),
        (PARSERS["harmony"], call_header("get_time"), " \n" * 32),
        (ListParser, '[{"name": "', "abcdefgh" * 8),
        (lambda tools: ThoughtParser(ListParser(tools), is_open=True), "a", " \n" * 32),
        (lambda tools: ThoughtParser(ListParser(tools), is_open=False), "", " \n" * 32),
    ],
)
def test_what_does_not_end_costs_no_more_with_each_token(make: Any, begin: str, token: str) -> None:
    """A model that repeats itself amid a call, or a thought, holds its gateway up for nobody."""
    parser = make(TOOLS)
    parser.feed(begin)
    taken_s = [0.0, 0.0]
    for turn in range(2):
        began_at = time.process_time()
        for _ in range(8000):
            parser.feed(token)
        taken_s[turn] = time.process_time() - began_at
    assert taken_s[1] < 2 * taken_s[0] + 0.1


@pytest.mark.parametrize(
    ("template", "call"), [(QWEN_TEMPLATE, qwen), (GLM_TEMPLATE, glm)], ids=["qwen", "glm"]
)
def test_what_a_template_shows_is_read_back(template: str, call: Any) -> None:
    """Calls as a prompt has them are the calls of an answer."""
    arguments = {"city": "Oslo", "days": 2, "is_long": False, "least": None, "at": ["é"]}
    function = {"name": "weather", "arguments": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    shown = Rendering(add_generation_prompt=False)
    text = ChatTemplate(template, SpecialTokens()).render([message], shown)
    family = family_of(template)
    assert family is not None
    require(lambda: PARSERS[family](TOOLS), text, "", [("weather", arguments)])
    assert call("weather", ("city", "Oslo"))[:40] in text


def test_the_list_of_a_required_call() -> None:
    """As the grammar makes it, with any spaces; a call that was cut off keeps what there is."""
    require(lambda: ListParser(TOOLS), LIST, "", [PARIS, NOW])
    spaced = '[\n {"name" : "get_time" , "parameters" :\n{ } \n}\n ]'
    require(lambda: ListParser(TOOLS), spaced, "", [NOW])
    _, _, calls = read(ListParser(TOOLS), LIST[:40], [])
    assert calls[0][0] == "weather"


def test_a_named_call_is_its_arguments() -> None:
    """The whole answer."""
    require(lambda: NamedParser({"weather": SCHEMA}), json.dumps(PARIS[1]), "", [PARIS])


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
        ("<think> \n", False, "", ""),
        ("<think>why</think> \n", False, "why", ""),
    ],
)
def test_thinking(text: str, is_open: bool, thought: str, words: str) -> None:
    """At the beginning of an answer, or begun by the prompt; however it is cut."""
    for cuts in ([], list(range(len(text))), [3], [8, 9]):
        got = read(ThoughtParser(None, is_open=is_open), text, cuts)
        assert got == (thought, words, []), cuts


@pytest.mark.parametrize(
    ("text", "thought", "words", "due"),
    [
        (f"{ANALYSIS}why<|end|>{FINAL}so<|return|>", "why", "so", []),
        (f"{ANALYSIS}why<|end|>{ANALYSIS}not<|end|>{FINAL}so", "why\nnot", "so", []),
        (f"{ANALYSIS}why<|end|>{call_header('get_time')}{{}}<|call|>", "why", "", [NOW]),
        (f"{FINAL}so", "", "so", []),
        (f"{ANALYSIS}why no", "why no", "", []),
    ],
)
def test_thinking_in_channels(text: str, thought: str, words: str, due: list[Any]) -> None:
    """However it is cut; what is not told apart keeps its marks."""
    for cuts in ([], list(range(len(text))), [9, 30]):
        said, shown, calls = read(HarmonyParser(TOOLS), text, cuts)
        assert (said, shown) == (thought, words)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == due
        _, shown, _ = read(HarmonyParser(TOOLS, tells_thinking=False), text, cuts)
        if thought and words:
            analysis, _, _ = text.partition(FINAL)
            assert shown == f"{analysis}{words}".replace(
                "<|end|><|start|>assistant<|ch", "<|end|><|ch"
            )


def test_an_answer_that_goes_on_amid_its_text() -> None:
    """The prompt ended there; what looks like a header's beginning is none."""
    require(lambda: HarmonyParser({}, is_text=True), "to=all: <|", "to=all: <|", [])


def test_calls_after_thinking() -> None:
    """What looks like a call within a thought is none."""
    text = f"<think>maybe {hermes(*NOW)}</think>{hermes(*PARIS)}"
    parser = ThoughtParser(PARSERS["hermes"](TOOLS), is_open=False)
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
        (QWEN_TEMPLATE, "qwen3_coder"),
        (GLM_TEMPLATE, "glm45"),
        ("{{ tools }}<seed:tool_call><function=", "seed_oss"),
        ("{{ tools }}<minimax:tool_call>", "minimax_m2"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{ tools }}<|channel|>analysis<|message|>", "harmony"),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_family_of_a_template(template: str | None, family: str | None) -> None:
    """By its marks; a template that never mentions tools has none."""
    assert family_of(template) == family
