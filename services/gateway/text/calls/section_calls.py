"""Calls in a section of their own: a header with the name, then JSON.

    deepseek_v3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
                  … <｜tool▁calls▁end｜>                                          V3.1
                  <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```…   V3, R1

Formats: the chat templates of DeepSeek-R1 and V3.1, and the parsers of their names in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.gateway.text.calls.parser import Said, ToolParser

MAX_HEAD = 256
"""Longest beginning of a call, up to its arguments: what is longer is text."""


class DeepSeekParser(ToolParser):
    """Both forms, whichever comes."""

    BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    HEAD = re.compile(
        CALL + r"\s*(?:function<｜tool▁sep｜>\s*([\w.-]+)\s*```json\s*|([\w.-]+)<｜tool▁sep｜>\s*)"
        r"(?=\{)"
    )
    _is_section = _is_call = False
    _is_first = False  # of the calls of a section

    def _said(self, *, is_over: bool) -> Iterator[Said]:
        while self._held:
            if self._value is not None and not (yield from self._arguments(self._value)):
                return
            if self._is_call:
                _, mark = self._text_before([self.CALL_END])
                if mark is None:
                    self._held = "" if is_over else self._held
                    return
                self._is_call = False
                continue
            if not self._is_section:
                if (yield from self._told_before([self.BEGIN])) is None:
                    return
                self._is_section = self._is_first = True
                continue
            self._held = self._held.lstrip()
            if self._held.startswith(self.END):
                self._held, self._is_section = self._held[len(self.END) :], False
                continue
            head = self.HEAD.match(self._held)
            name = "" if head is None else head[1] or head[2]
            if head is not None and name in self._tools:
                self._held = self._held[head.end() :]
                self._is_call, self._is_first = True, False
                yield self._begun(name)
                continue
            might = any(mark.startswith(self._held[: len(mark)]) for mark in (self.CALL, self.END))
            if head is None and might and len(self._held) < MAX_HEAD:
                if is_over and self.END.startswith(self._held):
                    self._held = ""
                if not is_over or not self._held:
                    return
            self._is_section = False
            self._held = (self.BEGIN if self._is_first else "") + self._held
            # What begins a section again would be looked at for ever.
            text, self._held = self._held[:1], self._held[1:]
            yield Said(text)
