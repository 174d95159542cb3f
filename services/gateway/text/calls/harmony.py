"""Harmony, the form of gpt-oss: an answer is messages, each in a channel.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends with ``<|start|>assistant``. A recipient may stand before the channel, and text in
``commentary`` without one is for the reader, too. Format:
https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from services.gateway.text.calls.parser import Said, ToolParser
from services.gateway.text.calls.thoughts import ThoughtMarks

HARMONY = ThoughtMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    are_special=True,
    again="<|channel|>analysis",
    then="<|start|>assistant",
    answer="<|channel|>final<|message|>",
)
MAX_HEADER = 512
"""Longest beginning of a message: what is longer is text."""

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>")
_TO = "to="
_MARKS = ("<|end|>", "<|call|>", "<|return|>", *_BEGINS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def call_header(name: str) -> str:
    """What stands before the arguments of a call."""
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


class HarmonyParser(ToolParser):
    """One answer. tells_thinking: apart, else it stays in the text, with its marks. is_text: the
    prompt ends amid a text, which the answer continues."""

    def __init__(
        self, tools: Mapping[str, Any], *, tells_thinking: bool = True, is_text: bool = False
    ) -> None:
        super().__init__(tools)
        self._tells_thinking = tells_thinking
        self._part = "text" if is_text else ""
        """What a message is; "" = its header is next, raw = text with its marks, name = a call if
        an object follows, call = whose name was told."""
        self._name = ""
        self._before = ""  # what is told before a body
        self._told_parts: set[str] = set()

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if not self._part and not self._has_read_header(is_over=is_over):
                return
            if self._part == "name":
                start = self._held.lstrip()
                if not start and len(self._held) < MAX_HEADER:
                    return
                if start.startswith("{"):
                    self._part, self._held = "call", start
                    yield self._begun(self._name)
                else:
                    self._part = "raw"
            if self._value is not None and not (yield from self._arguments(self._value)):
                return
            body, mark = self._text_before(_MARKS)
            end = "" if mark is None else mark
            if end in _BEGINS:  # the end of a message was left out
                self._held, end = end + self._held, ""
            yield from self._of_body(body, end)
            if mark is None:
                return
            self._part = ""

    def _has_read_header(self, *, is_over: bool) -> bool:
        """Take what stands before a message's body, if it is whole."""
        start = self._held.lstrip()
        header, found, body = start.partition(_MESSAGE)
        might = any(start.startswith(mark) or mark.startswith(start) for mark in (*_BEGINS, _TO))
        if might and not found and len(start) < MAX_HEADER:
            if is_over and start.startswith(_BEGINS):
                self._held = ""  # half a header is no text
            if not is_over or not self._held:
                return False
        if not might or not found:  # an answer that had to match something has no header
            self._part = "text"
            self._before = next((mark for mark in _BEGINS if start.startswith(mark)), "")
            if self._before:
                self._held = start[len(self._before) :]
            return True
        self._held, self._before = body, ""
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if to is not None:
            self._name = to[1]
            self._part = "name" if to[1] in self._tools else "raw"
        elif channel is not None and channel[1] == "analysis":
            self._part = "thought" if self._tells_thinking else "raw"
        else:
            self._part = "text"
        if self._part in ("name", "raw"):
            self._before = header + found
        elif self._part in self._told_parts:
            self._before = "\n"  # each message is a line of its own
        return True

    def _of_body(self, body: str, end: str) -> Iterator[Said]:
        """Tell a part of a message. end: the mark that it ends with, "" = it goes on."""
        part = self._part
        text = body + end if part == "raw" else body
        if text and part != "call":
            yield Said(self._before + text, is_thought=part == "thought")
            self._before = ""
            self._told_parts.add(part)
