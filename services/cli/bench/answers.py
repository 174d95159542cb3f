"""Reads one OpenAI-style stream of events into its record: when tokens came, and how many.

Where the server counts in every chunk (``continuous_usage_stats``), counts are exact. Else a chunk
with text is one token, until the usage at the end says how many there were. Tokens of one chunk
share its time. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any

import orjson

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


class AnswerReader:
    """Of one stream."""

    __slots__ = ("_is_done", "_is_finished", "_record", "_total")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._is_done = False
        self._is_finished = False
        self._total = 0

    def take(self, payload: bytes, at: float) -> None:
        """Take one event in. Raises ValueError: it is not JSON."""
        if payload == b"[DONE]":
            self._is_done = True
            return
        event: Any = orjson.loads(payload)
        if not isinstance(event, dict):
            raise ValueError("an event is not an object")
        self._take(event, at)  # pyright: ignore[reportUnknownArgumentType]

    def _take(self, event: dict[str, Any], at: float) -> None:
        record = self._record
        error = event.get("error")
        if error is not None:
            self._fail(error)
            return
        choices = event.get("choices")
        choice: dict[str, Any] | None = choices[0] if choices else None
        usage = event.get("usage")
        if usage:
            self._total = int(usage.get("completion_tokens") or 0)
            record.num_prompt = int(usage.get("prompt_tokens") or 0)
            details = usage.get("prompt_tokens_details")
            if details:
                record.num_cached = int(details.get("cached_tokens") or 0)
        if choice is None:
            return
        is_last = bool(choice.get("finish_reason"))
        if usage and (record.is_counted or not is_last):
            record.is_counted = True  # a count in the last chunk alone says nothing of the others
            if self._total > record.num_output:
                record.add(at, self._total - record.num_output)
        elif _has_text(choice):
            record.add(at, 1)
        self._is_finished = self._is_finished or is_last

    def end(self) -> None:
        """The stream is over: say how it ended."""
        record = self._record
        if record.end is not Ending.UNFINISHED:
            return
        if not (self._is_done or self._is_finished):
            record.fail(*_broken(record, "the stream ended without an end of the answer"))
        elif not record.times:
            record.fail(Ending.FAILED, "an answer without a token")
        else:
            record.correct(self._total or record.num_output)
            record.end = Ending.COMPLETE

    def _fail(self, error: Any) -> None:
        record = self._record
        is_told = isinstance(error, dict)
        words = str(error.get("message", error) if is_told else error)  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
        code: Any = error.get("code") if is_told else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if not record.times and code in REFUSALS:
            record.fail(Ending.REFUSED, words)
        else:
            record.fail(*_broken(record, words))


def _broken(record: Record, words: str) -> tuple[Ending, str]:
    return (Ending.CUT if record.times else Ending.FAILED), words


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in _TEXT_FIELDS)
