"""Calls of tools, found in the text of an answer as it comes, in the ways that models write them.

    hermes     text <tool_call>{"name": "f", "arguments": {…}}</tool_call> …     Hermes, Qwen
    llama3     {"name": "f", "parameters": {…}}; …                               Llama 3.1 and later
    mistral    [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                  Mistral; also f{…}
    pythonic   [f(a=1), g(b="x")]                                                Llama 4, ToolACE

Text before a call leaves at once, but for what may be the beginning of one. A call leaves in parts
where its name comes first: the name, then its arguments as they come. What looks like a call and is
none is text. Knows no tokens and no wire format.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, NoReturn, cast

_HEAD = re.compile(
    r'\s{0,99}\{\s{0,99}"name"\s{0,99}:\s{0,99}("(?:[^"\\]|\\.){0,256}")\s{0,99},'
    r'\s{0,99}"(?:arguments|parameters)"\s{0,99}:\s{0,99}(?=\{)'
)
"""A call whose name comes first, up to its arguments. What is no object (null, or an object as
text) is read as a whole. Bounded, for it is looked for with every token."""
_BARE = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's newer way, up to the arguments."""

MAX_ENDS_IN_STRINGS = 8
"""Of one call; what has more of them is text up to the first."""


class Said(NamedTuple):
    """Text, or a part of a call. call: how many calls came before it, -1 = text. name: with the
    first part of a call. is_thought: text of thinking."""

    text: str
    call: int = -1
    name: str = ""
    is_thought: bool = False


class JsonValue:
    """Finds where a JSON value ends that comes in pieces."""

    _depth = 0
    _in_string = _is_escaped = _has_begun = False

    def take(self, text: str) -> int | None:
        """Return how much of ``text`` belongs to the value, None = all, and it goes on."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return index + 1
            elif char == '"':
                self._in_string = self._has_begun = True
            elif char in "{[":
                self._depth += 1
                self._has_begun = True
            elif char in "}]":
                if not self._depth:
                    return index  # of a number, at the end of what it stands in
                self._depth -= 1
                if not self._depth:
                    return index + 1
            elif not self._depth:
                if char in ", \n" and self._has_begun:
                    return index
                self._has_begun = self._has_begun or not char.isspace()
        return None


class ToolParser:
    """One answer. tools: those that there are, with the schemas of their arguments; a call of
    another is text. max_calls: those after so many are left out, None = all are told."""

    max_calls: int | None = None
    num_calls = 0
    _held = ""
    _value: JsonValue | None = None  # of the arguments that are on their way

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._tools = tools

    @property
    def is_within_call(self) -> bool:
        """Whether arguments have begun and not ended; of an answer that is over: nobody shall run
        half a call."""
        return self._value is not None

    def feed(self, text: str) -> list[Said]:
        """Take text, and return what is sure now."""
        held, self._held = self._held, ""
        held += text  # in its place, for nobody else has it
        self._held = held
        return self._told(self._said(is_over=False))

    def finish(self) -> list[Said]:
        """Return the rest: the answer is over, maybe within a call."""
        said = self._told(self._said(is_over=True))
        rest, self._held = self._held, ""
        if rest:
            said.append(Said(rest))
        return said

    def _told(self, said: Iterator[Said]) -> list[Said]:
        most = self.max_calls
        return [one for one in said if most is None or one.call < most]

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        raise NotImplementedError

    def _text_before(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Cut off the text before the first of some marks, or that no mark can begin in."""
        found = min(
            ((place, mark) for mark in marks if (place := self._held.find(mark)) >= 0),
            default=None,
        )
        if found is not None:
            place, mark = found
            text, self._held = self._held[:place], self._held[place + len(mark) :]
            return text, mark
        cut = len(self._held) - max(num_begun(self._held, mark) for mark in marks)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def _arguments(self, value: JsonValue) -> Generator[Said, None, bool]:
        """Take what has come of the arguments that are on their way; return whether they are
        whole."""
        end = value.take(self._held)
        part, self._held = self._held[:end], "" if end is None else self._held[end:]
        if part:
            yield Said(part, self.num_calls - 1)
        if end is not None:
            self._value = None
        return end is not None

    def _whole(self, name: str, arguments: Any) -> Said:
        """A call that came at once."""
        call, self.num_calls = self.num_calls, self.num_calls + 1
        text = arguments if isinstance(arguments, str) else _json(arguments)
        # Half a character, which JSON and Python can name, has no UTF-8: it stays an escape.
        return Said(text.encode(errors="backslashreplace").decode(), call, name)

    def _of_value(self, value: Any) -> list[Said] | None:
        """The calls of a JSON value, None = it is no call of ours."""
        calls = cast("list[Any]", value) if isinstance(value, list) else [value]
        return self._of_read([self._read(one) for one in calls])

    def _of_read(self, read: Sequence[tuple[str, Any] | None]) -> list[Said] | None:
        """The calls of names and arguments, None = there is none, or one is none of ours."""
        if not read or None in read:
            return None
        return [self._whole(*one) for one in read if one is not None]

    def _read(self, value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, dict):
            return None
        call = cast("dict[str, Any]", value)
        name = call.get("name")
        if not isinstance(name, str) or name not in self._tools:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        return name, {} if arguments in (None, "") else arguments


class TextParser(ToolParser):
    """All is text."""

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        text, self._held = self._held, ""
        if text:
            yield Said(text)


class HermesParser(ToolParser):
    """Between ``<tool_call>`` and ``</tool_call>``."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    _is_call = _is_after_call = _has_head = False
    _ends: tuple[int, ...] = ()  # marks within a string, of a call that is read as a whole
    _sought = 0  # before here is no other one

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if self._is_after_call:  # spaces between calls are no text
                self._held = self._held.lstrip()
                if not self._held:
                    return
                self._is_after_call = False
            if not self._is_call:
                text, mark = self._text_before([self.BEGIN])
                if text:
                    yield Said(text)
                if mark is None:
                    return
                self._is_call, self._has_head, self._ends, self._sought = True, False, (), 0
            if not self._has_head and (head := _HEAD.match(self._held)):
                name = read_json(head[1])
                if name in self._tools:
                    self._held = self._held[head.end() :]
                    self._has_head, self._value = True, JsonValue()
                    self.num_calls += 1
                    yield Said("", self.num_calls - 1, name)
            if self._value is not None and not (yield from self._arguments(self._value)):
                return
            if self._has_head:
                _, mark = self._text_before([self.END, self.BEGIN])
                if mark is None:
                    self._held = "" if is_over else self._held
                    return
                if mark == self.BEGIN:  # the mark between two calls was left out
                    self._held = mark + self._held
                self._is_call, self._is_after_call = False, True
                continue
            end = self._held.find(self.END, self._sought)
            if end < 0 and not is_over:
                self._sought = max(0, len(self._held) - len(self.END) + 1)
                return
            # Some models leave the last mark out.
            calls, is_cut = self._read_whole(self._held if end < 0 else self._held[:end])
            if end >= 0 and is_cut and len(self._ends) < MAX_ENDS_IN_STRINGS:
                self._ends, self._sought = (*self._ends, end), end + 1
                continue
            if calls is None and self._ends:
                end = self._ends[0]
            if end < 0:
                self._held = "" if calls else self.BEGIN + self._held  # which ``finish`` tells
                yield from calls or ()
                return
            inner, self._held = self._held[:end], self._held[end + len(self.END) :]
            self._is_call, self._is_after_call = False, calls is not None
            yield from calls or [Said(self.BEGIN + inner + self.END)]

    def _read_whole(self, text: str) -> tuple[list[Said] | None, bool]:
        """Return the calls of a text, None = it is none; and whether it ends within a string."""
        try:
            return self._of_value(_DECODER.decode(text)), False
        except json.JSONDecodeError as error:
            return None, error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            return None, False


class WholeJsonParser(ToolParser):
    """An answer that is calls and nothing else, or none at all: whole, once it is over.

    marks: what may stand before it. A text that does not begin like it leaves at once.
    """

    MARKS: tuple[str, ...] = ("<|python_tag|>",)
    BEGINS = "{"
    _is_text = _is_begun = False

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        if self._is_begun and not is_over:
            return
        if not self._is_text:
            start = self._held.lstrip()
            mark = next((one for one in self.MARKS if start.startswith(one)), "")
            start = start[len(mark) :].lstrip()
            self._is_begun = start.startswith(self.BEGINS)
            marks = () if mark else self.MARKS  # one may be on its way
            might = self._is_begun or not start or any(one.startswith(start) for one in marks)
            if might and not is_over:
                return
            if might:
                calls = self._calls(start)
                if calls:
                    self._held = ""
                    yield from calls
            self._is_text = True
        if self._held:
            text, self._held = self._held, ""
            yield Said(text)

    def _calls(self, text: str) -> list[Said] | None:
        values: list[Any] = []
        while text:
            try:
                value, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            values += cast("list[Any]", value) if isinstance(value, list) else [value]
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return self._of_value(values)


class PythonicParser(WholeJsonParser):
    """A list of Python's calls with literals for arguments."""

    MARKS = ("<|python_start|>", "<|python_tag|>")
    BEGINS = "["

    def _calls(self, text: str) -> list[Said] | None:
        text = text.strip().removesuffix("<|python_end|>").strip()
        try:
            body = ast.parse(text, mode="eval").body
            parts = body.elts if isinstance(body, ast.List) else []
            read = [self._call_of(part) for part in parts]
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return None
        return self._of_read(read)

    def _call_of(self, part: ast.expr) -> tuple[str, Any] | None:
        if not isinstance(part, ast.Call) or part.args:
            return None
        name = ast.unparse(part.func)
        if name not in self._tools:
            return None
        if not all(word.arg for word in part.keywords):
            return None  # f(**…)
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in part.keywords}
        _json(arguments)  # a set, bytes or infinity are no JSON: TypeError, ValueError
        return name, arguments


class MistralParser(ToolParser):
    """After ``[TOOL_CALLS]``: a list, or name and arguments one after the other."""

    MARK = "[TOOL_CALLS]"
    _is_call = False

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        if not self._is_call:
            text, mark = self._text_before([self.MARK])
            if text:
                yield Said(text)
            if mark is None:
                return
            self._is_call = True
        if not is_over:
            return
        calls: list[Said] = []
        text = self._held.strip()
        found = self._of_value(read_json(text)) if text.startswith("[") else None
        if found is None:
            while text:
                head = _BARE.match(text)
                if head is None or head[1] not in self._tools:
                    break
                try:
                    arguments, end = _DECODER.raw_decode(text, head.end())
                except (ValueError, RecursionError):
                    break
                calls.append(self._whole(head[1], arguments))
                text = text[end:].lstrip().removeprefix(self.MARK)
            else:
                found = calls
        self._held = "" if found else self.MARK + self._held
        yield from found or ()


class ListParser(ToolParser):
    """The JSON list that the grammar of ``tool_choice: required`` makes; calls leave one by one."""

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if self._value is None:
                self._held = self._held.lstrip(" \t\r\n[,}")
                head = _HEAD.match(self._held)
                if head is None:
                    if is_over:  # the list's end, or a call that was cut off before its name
                        self._held = ""
                    return
                self._held = self._held[head.end() :]
                self._value = JsonValue()
                self.num_calls += 1
                yield Said("", self.num_calls - 1, json.loads(head[1]))
            if not (yield from self._arguments(self._value)):
                return


class NamedParser(ToolParser):
    """An answer that is the arguments of one call, whose name is known."""

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        if not self.num_calls:
            self.num_calls, self._value = 1, JsonValue()
            (name,) = self._tools
            yield Said("", 0, name)
        text, self._held = self._held, ""
        if self._value is not None and self._value.take(text) is not None:
            self._value = None
        if text:
            yield Said(text, 0)


class ThoughtParser:
    """Tells thinking (``<think>…</think>``, at the beginning) from what comes after it.

    is_open: the prompt has begun it. after: takes the rest, None = it is text.
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, after: ToolParser | None, *, is_open: bool) -> None:
        self._after = after
        self._is_thinking = is_open
        self._is_decided = is_open
        self._is_blank = True  # of the part that is on: leading spaces go
        self._held = ""
        self._spaces: list[str] = []

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._after.num_calls if self._after is not None else 0

    @property
    def is_within_call(self) -> bool:
        return self._after is not None and self._after.is_within_call

    def feed(self, text: str) -> list[Said]:
        if text.isspace() and (self._is_thinking or not self._is_decided):
            self._spaces.append(text)  # whether they count is told by what comes after them
            return []
        self._held += "".join(self._spaces) + text
        self._spaces.clear()
        if not self._is_decided:
            start = self._held.lstrip()
            if len(start) < len(self.BEGIN) and self.BEGIN.startswith(start):
                return []
            self._is_decided = True
            if start.startswith(self.BEGIN):
                self._is_thinking, self._held = True, start[len(self.BEGIN) :]
            else:
                self._is_blank = False
        if self._is_blank:
            self._held = self._held.lstrip()
            self._is_blank = not self._held
        if not self._is_thinking:
            return self._rest()
        thought, mark, rest = self._held.partition(self.END)
        if mark:
            self._is_thinking, self._held = False, rest.lstrip()
            self._is_blank = not self._held
            return [*_thought(thought.rstrip()), *self._rest()]
        # The last spaces are held, too: they go if the end follows.
        sure = thought[: len(thought) - num_begun(thought, self.END)].rstrip()
        self._held = thought[len(sure) :]
        return _thought(sure)

    def finish(self) -> list[Said]:
        self._held += "".join(self._spaces)
        if self._is_thinking:
            return _thought(self._held)
        said = self._rest()
        return said + (self._after.finish() if self._after is not None else [])

    def _rest(self) -> list[Said]:
        text, self._held = self._held, ""
        if self._after is not None:
            return self._after.feed(text)
        return [Said(text)] if text else []


def _thought(text: str) -> list[Said]:
    return [Said(text, is_thought=True)] if text else []


def num_begun(text: str, mark: str) -> int:
    """How many characters at a text's end may begin a mark."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0


def read_json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not know."""
    raise ValueError(text)


def _finite(text: str) -> float:
    """Refuse 1e999, of which Python makes infinity."""
    value = float(text)
    return value if isfinite(value) else _no_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
