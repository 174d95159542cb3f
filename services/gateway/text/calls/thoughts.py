"""Thinking, told from what comes after it."""

from __future__ import annotations

from typing import NamedTuple

from services.gateway.text.calls.parser import Said, ToolParser, num_begun


class ThoughtMarks(NamedTuple):
    """What stands around thinking, and where an answer goes on after it.

    are_special: special tokens, which answers do not show otherwise. again: what begins thinking
    anew amid an answer, "" = nothing does. then: between thinking and what comes next. answer:
    before an answer's text.
    """

    begin: str
    end: str
    are_special: bool = False
    again: str = ""
    then: str = ""
    answer: str = ""


THINK = ThoughtMarks("<think>", "</think>")


class ThoughtParser:
    """Tells thinking, at the beginning, from what comes after it.

    is_open: the prompt has begun it. after: takes the rest, None = it is text.
    """

    def __init__(
        self, after: ToolParser | None, *, is_open: bool, marks: ThoughtMarks = THINK
    ) -> None:
        self._after = after
        self._marks = marks
        self._is_thinking = is_open
        self._is_decided = is_open
        self._is_blank = True  # of the part that is on: leading spaces go
        self._held = ""
        self._spaces: list[str] = []

    @property
    def num_calls(self) -> int:
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
        begin, end = self._marks.begin, self._marks.end
        if not self._is_decided:
            start = self._held.lstrip()
            if len(start) < len(begin) and begin.startswith(start):
                return []
            self._is_decided = True
            if start.startswith(begin):
                self._is_thinking, self._held = True, start[len(begin) :]
            else:
                self._is_blank = False
        if self._is_blank:
            self._held = self._held.lstrip()
            self._is_blank = not self._held
        if not self._is_thinking:
            return self._rest()
        thought, mark, rest = self._held.partition(end)
        if mark:
            self._is_thinking, self._held = False, rest.lstrip()
            self._is_blank = not self._held
            return [*_thought(thought.rstrip()), *self._rest()]
        # The last spaces are held, too: they go if the end follows.
        sure = thought[: len(thought) - num_begun(thought, end)].rstrip()
        self._held = thought[len(sure) :]
        return _thought(sure)

    def finish(self) -> list[Said]:
        self._held += "".join(self._spaces)
        if self._is_decided and self._is_blank:
            self._held = self._held.lstrip()
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
