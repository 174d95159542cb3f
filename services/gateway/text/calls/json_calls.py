"""Calls that are JSON, or a list of Python's calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any, cast

from services.gateway.text.calls.parser import DECODER, HEAD, Said, ToolParser, read_json, to_json

_BARE = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's newer way, up to the arguments."""

MAX_ENDS_IN_STRINGS = 8
"""Of one call; what has more of them is text up to the first."""


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
                if (yield from self._told_before([self.BEGIN])) is None:
                    return
                self._is_call, self._has_head, self._ends, self._sought = True, False, (), 0
            if not self._has_head and (head := HEAD.match(self._held)):
                name = read_json(head[1])
                if name in self._tools:
                    self._held = self._held[head.end() :]
                    self._has_head = True
                    yield self._begun(name)
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
            return self._of_value(DECODER.decode(text)), False
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
                value, end = DECODER.raw_decode(text)
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
        to_json(arguments)  # a set, bytes or infinity are no JSON: TypeError, ValueError
        return name, arguments


class MistralParser(ToolParser):
    """After ``[TOOL_CALLS]``: a list, or name and arguments one after the other."""

    MARK = "[TOOL_CALLS]"
    _is_call = False

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        if not self._is_call:
            if (yield from self._told_before([self.MARK])) is None:
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
                    arguments, end = DECODER.raw_decode(text, head.end())
                except (ValueError, RecursionError):
                    break
                calls.append(self._whole(head[1], arguments))
                text = text[end:].lstrip().removeprefix(self.MARK)
            else:
                found = calls
        self._held = "" if found else self.MARK + self._held
        yield from found or ()
