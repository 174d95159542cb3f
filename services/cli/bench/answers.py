"""Reads one OpenAI-style stream of events into its record: when tokens came, and how many.

Where the server counts in every chunk (``continuous_usage_stats``), counts are exact. Else a chunk
with text is one token, until the usage at the end says how many there were. Tokens of one chunk
share its time. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from services.cli.bench.records import Ending, Record

REFUSALS = (429, 503)
MOST_LINE_BYTES = 8 << 20
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class EventLines:
    """The payloads of one stream of server-sent events, however it is cut; a payload of several
    ``data:`` lines is not made by any of these servers."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of all lines that are complete now.

        Raises ValueError: a line without an end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise ValueError("a line of the stream does not end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Of an answer or of its reasoning; a chunk that only opens an answer has none."""
        if self.delta is None:
            return bool(self.text)
        return any(self.delta.get(name) for name in _TEXT_FIELDS)


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_read: Final = msgspec.json.Decoder(_Event).decode


class AnswerReader:
    __slots__ = ("_is_done", "_record", "_total")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._is_done = False
        self._total = 0

    def take(self, payload: bytes, at: float) -> None:
        """Take one event in. Raises ValueError: it is not JSON, or no event of OpenAI's."""
        if payload == b"[DONE]":
            self._is_done = True
            return
        record, event = self._record, _read(payload)
        if event.error is not None:
            self._fail(event.error)
            return
        if usage := event.usage:
            self._total = usage.completion_tokens or 0
            record.num_prompt = usage.prompt_tokens or 0
            if usage.prompt_tokens_details:
                record.num_cached = usage.prompt_tokens_details.cached_tokens or 0
        if not event.choices:
            return
        choice = event.choices[0]
        is_last = bool(choice.finish_reason)
        if usage and (record.is_counted or not is_last or not record.times):
            record.is_counted = True  # a count in the last chunk alone says nothing of the others
            if self._total > record.num_output:
                record.add(at, self._total - record.num_output)
        elif choice.has_text:
            record.add(at, 1)
        self._is_done = self._is_done or is_last

    def end(self) -> None:
        """The stream is over: say how it ended."""
        record = self._record
        if record.end is not Ending.UNFINISHED:
            return
        if not self._is_done:
            record.fail(_broken(record), "the stream ended without an end of the answer")
        elif not record.times:
            record.fail(Ending.FAILED, "an answer without a token")
        else:
            record.correct(self._total or record.num_output)
            record.end = Ending.COMPLETE

    def _fail(self, error: Any) -> None:
        code, words = None, str(error)
        if isinstance(error, dict):
            told = cast("dict[str, Any]", error)
            code, words = told.get("code"), str(told.get("message", told))
        is_refused = not self._record.times and code in REFUSALS
        self._record.fail(Ending.REFUSED if is_refused else _broken(self._record), words)


def _broken(record: Record) -> Ending:
    return Ending.CUT if record.times else Ending.FAILED
