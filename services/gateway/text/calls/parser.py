"""What all parsers of answers share: what they say, where a JSON value ends, and what must come.

See the package for what is a call and when it leaves.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, NoReturn, cast

HEAD = re.compile(
    r'\s{0,99}\{\s{0,99}"name"\s{0,99}:\s{0,99}("(?:[^"\\]|\\.){0,256}")\s{0,99},'
    r'\s{0,99}"(?:arguments|parameters)"\s{0,99}:\s{0,99}(?=\{)'
)
"""A call whose name comes first, up to its arguments. What is no object (null, or an object as
text) is read as a whole. Bounded, for it is looked for with every token."""


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


class ToolParser(ABC):
    """One answer. tools: those that there are, with the schemas of their arguments; a call of
    another is text. max_calls: those after so many are left out, None = all are told."""

    max_calls: int | None = None
    num_calls = 0
    _held: str = ""
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

    @abstractmethod
    def _said(self, *, is_over: bool) -> Iterator[Said]: ...

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

    def _told_before(self, marks: Sequence[str]) -> Generator[Said, None, str | None]:
        """Tell that text; return the mark, None = more must come."""
        text, mark = self._text_before(marks)
        if text:
            yield Said(text)
        return mark

    def _begun(self, name: str) -> Said:
        """A call whose arguments follow (``_arguments``)."""
        self._value = JsonValue()
        self.num_calls += 1
        return Said("", self.num_calls - 1, name)

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
        text = arguments if isinstance(arguments, str) else to_json(arguments)
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


class ListParser(ToolParser):
    """The JSON list that the grammar of ``tool_choice: required`` makes; calls leave one by one."""

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if self._value is None:
                self._held = self._held.lstrip(" \t\r\n[,}")
                head = HEAD.match(self._held)
                if head is None:
                    if is_over:  # the list's end, or a call that was cut off before its name
                        self._held = ""
                    return
                self._held = self._held[head.end() :]
                yield self._begun(json.loads(head[1]))
            if self._value is not None and not (yield from self._arguments(self._value)):
                return


class NamedParser(ToolParser):
    """An answer that is the arguments of one call, whose name is known."""

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        if not self.num_calls:
            (name,) = self._tools
            yield self._begun(name)
        text, self._held = self._held, ""
        if self._value is not None and self._value.take(text) is not None:
            self._value = None
        if text:
            yield Said(text, 0)


def num_begun(text: str, mark: str) -> int:
    """How many characters at a text's end may begin a mark."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0


def read_json(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not know."""
    raise ValueError(text)


def _finite(text: str) -> float:
    """Refuse 1e999, of which Python makes infinity."""
    value = float(text)
    return value if isfinite(value) else _no_constant(text)


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
