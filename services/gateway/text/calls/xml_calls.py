"""Calls whose arguments stand between marks, each by itself, in no JSON.

    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    seed_oss      the same in <seed:tool_call>
    minimax_m2    <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>
                  … </minimax:tool_call>
    glm45         <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>

A value is the text itself where its schema wants a string, else JSON. Strings leave as they come,
other values when they are whole. Formats: the chat templates of Qwen3-Coder, Seed-OSS, MiniMax-M2
and GLM 4.5; what is read beyond them is what the parsers of their names in vLLM and SGLang read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from services.gateway.text.calls.parser import Said, ToolParser, num_begun, read_json
from services.gateway.text.schemas import as_list, at_pointer

MAX_HEAD = 256
"""Longest beginning of a call, up to the end of its name: what is longer is text."""
MAX_MARK = 24
"""No mark is longer."""
MAX_KEY = 1024
"""Longest key with its marks and spaces."""

_TEXT = frozenset({"string"})
_KINDS = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{type(None): "null", list: "array", dict: "object"},
}


class XmlParser(ToolParser):
    """See the module.

    BEGINS: how a call may begin. HEAD: from there to the end of its name. KEY: from there, or from
    the value before, to a value; KEY_BEGIN: what it begins with. ENDS: where a value ends; the
    first one is its own. CLOSES: where arguments end. TRIM: what may stand between a value and its
    marks. OF_UNKNOWN: the types of a value of which the schema says nothing; none = any.
    """

    BEGINS: ClassVar[tuple[str, ...]]
    HEAD: ClassVar[re.Pattern[str]]
    KEY_BEGIN: ClassVar[str]
    KEY: ClassVar[re.Pattern[str]]
    ENDS: ClassVar[tuple[str, ...]]
    CLOSES: ClassVar[tuple[str, ...]]
    TRIM: ClassVar[str] = ""
    OF_UNKNOWN: ClassVar[frozenset[str]] = frozenset()
    END: ClassVar[str] = "</tool_call>"

    _schema: Mapping[str, Any]  # of the call's arguments
    _known: dict[int, frozenset[str]]  # types by the identity of their schema, which may be large
    _is_open = _is_after_call = False
    _num_values = 0
    _types: frozenset[str] | None = None  # of the value that is on its way
    _sought = 0  # before here it does not end

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._known = {}

    @property
    def is_within_call(self) -> bool:
        return self._is_open

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if self._is_after_call:  # spaces between calls are no text
                self._held = self._held.lstrip()
                # Arguments may close by a mark of their own: the call's follows, or is left out.
                if self._held.startswith(self.END):
                    self._held = self._held.removeprefix(self.END)
                    continue
                if self.END.startswith(self._held):
                    self._held = "" if is_over else self._held
                    return
                self._is_after_call = False
            if not self._is_open:
                mark = yield from self._told_before(self.BEGINS)
                if mark is None:
                    return
                head = self.HEAD.match(mark + self._held)
                if head is None and len(self._held) < MAX_HEAD and not is_over:
                    self._held = mark + self._held
                    return
                if head is None or head[1] not in self._tools:
                    yield Said(mark)
                    continue
                self._held = self._held[head.end() - len(mark) :]
                self._is_open, self._schema, self._num_values = True, self._tools[head[1]], 0
                self.num_calls += 1
                yield Said("", self.num_calls - 1, head[1])
            part = self._key_or_end() if self._types is None else self._value_part(self._types)
            if part:
                yield Said(part, self.num_calls - 1)
            elif is_over:  # half a mark, or half a value that is no text
                self._held = ""
            else:
                return

    def _key_or_end(self) -> str:
        """Take a key, or the end of the arguments, once it is there; return its JSON."""
        key = self.KEY.search(self._held)
        end = _first(self._held, self.CLOSES)
        if key is not None and (end is None or key.start() < end[0]):
            self._held = self._held[key.end() :]
            self._types = self._types_of(key[1])
            begin = ", " if self._num_values else "{"
            self._num_values += 1
            return f"{begin}{_json(key[1])}: " + '"' * (self._types == _TEXT)
        if end is None:
            # A key may still begin where the last mark does, or amid one, and nothing before.
            begin = self._held.rfind(self.KEY_BEGIN, -MAX_KEY)
            self._held = self._held[begin if begin >= 0 else -MAX_MARK :]
            return ""
        self._held = self._held[end[0] + len(end[1]) :]
        self._is_open, self._is_after_call = False, True
        return "}" if self._num_values else "{}"

    def _value_part(self, types: frozenset[str]) -> str:
        """Take what is sure of a value, and return its JSON."""
        end = _first(self._held, self.ENDS, self._sought)
        if end is None and types != _TEXT:
            self._sought = max(0, len(self._held) - MAX_MARK)
            return ""
        self._sought = 0
        if end is None:
            # What may become the end waits, and what may have to go before it.
            marks = (*self.ENDS, *(self.TRIM + mark for mark in self.ENDS))
            sure = len(self._held) - max(num_begun(self._held, mark) for mark in marks)
            text, self._held = self._held[:sure], self._held[sure:]
            return _json(text)[1:-1]
        text = self._held[: end[0]].removesuffix(self.TRIM)
        self._held, self._types = self._held[end[0] :].removeprefix(self.ENDS[0]), None
        return _json(text)[1:] if types == _TEXT else _value(text, types)

    def _types_of(self, key: str) -> frozenset[str]:
        named = self._schema.get("properties")
        parts = cast("dict[str, Any]", named) if isinstance(named, dict) else {}
        wanted = parts.get(key, self._schema.get("additionalProperties"))
        if id(wanted) not in self._known:
            self._known[id(wanted)] = frozenset(_types(wanted, self._schema)) or self.OF_UNKNOWN
        return self._known[id(wanted)]


class QwenCoderParser(XmlParser):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3. The first mark is left out at times, and so are
    ends of values."""

    BEGINS = ("<tool_call>", "<function=")
    HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]+)>")
    KEY_BEGIN = "<parameter="
    # A line end after it is not the value's, so it is no key before one more character is here.
    KEY = re.compile(r"<parameter=([^<>]{1,512})>(?:\n|(?=[^\n]))")
    ENDS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
    CLOSES = ("</function>", "</tool_call>")
    TRIM = "\n"
    OF_UNKNOWN = _TEXT


class SeedParser(QwenCoderParser):
    """Seed-OSS."""

    END = "</seed:tool_call>"
    BEGINS = ("<seed:tool_call>", "<function=")
    HEAD = re.compile(r"(?:<seed:tool_call>\s*)?<function=([^<>\s]+)>")
    ENDS = ("</parameter>", "<parameter=", "</function>", END)
    CLOSES = ("</function>", END)


class MiniMaxParser(XmlParser):
    """MiniMax-M2. One mark stands around all calls, and is left out at times."""

    END = "</minimax:tool_call>"
    BEGINS = ("<minimax:tool_call>", "<invoke name=")
    HEAD = re.compile(r'(?:<minimax:tool_call>\s*)?<invoke name="?([^<>\s"]+)"?>')
    KEY_BEGIN = "<parameter name="
    KEY = re.compile(r'<parameter name="?([^<>"]{1,512})"?>')
    ENDS = ("</parameter>", "<parameter name=", "</invoke>", END)
    CLOSES = ("</invoke>", END)
    OF_UNKNOWN = _TEXT


class GlmParser(XmlParser):
    """GLM 4.5 and later. Line ends between marks are written as two characters at times."""

    BEGINS = ("<tool_call>",)
    HEAD = re.compile(r"<tool_call>\s*([A-Za-z0-9_.-]+)(?:\\n|\s)*(?=<)")
    KEY_BEGIN = "<arg_key>"
    # Of one text one reading: three neighbours that each take spaces cost the cube of their number.
    KEY = re.compile(
        r"<arg_key>\s{0,99}([^<>\s](?:[^<>]{0,512}[^<>\s])?)\s{0,99}</arg_key>"
        r"(?:\\n|\s){0,99}<arg_value>"
    )
    ENDS = ("</arg_value>", "</tool_call>")
    CLOSES = ("</tool_call>",)


def _first(text: str, marks: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """The first of some marks in a text, with its place."""
    found = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    return min(found, default=None)


def _types(schema: Any, root: Any) -> set[str]:
    """The types that a schema lets a value have; none = nothing is known."""
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(cast("Any", part)) in seen:
            continue
        seen.add(id(cast("Any", part)))
        fields = cast("dict[str, Any]", part)
        kind, values = fields.get("type"), as_list(fields.get("enum"))
        if "const" in fields:
            values = [fields["const"]]
        if kind is not None:
            types.update(str(one) for one in (as_list(kind) or [kind]))
        elif values:
            types.update(_KINDS[type(value)] for value in values)
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += as_list(fields.get(key))
            ref = fields.get("$ref")
            if isinstance(ref, str) and ref.startswith("#/"):
                waiting.append(at_pointer(root, ref[1:]))
    return types


def _value(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: as it was written where it is JSON of a type that it may have."""
    written = text.strip()
    value = read_json(written)
    if value is None and written != "null":
        written = _of_python(written)
        value = read_json(written)
    if value is None and written != "null":
        return _json(text)
    kind = _KINDS[type(value)]
    is_wanted = kind in types or (kind == "integer" and "number" in types)
    if "string" in types and (kind == "string" or not is_wanted):
        return _json(text)
    return written


def _of_python(text: str) -> str:
    """A literal of Python's as JSON, "" = it is none. Templates show ``True`` and ``None``, and
    models take them over."""
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return ""


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
