"""Answers in the shapes of the OpenAI API: whole bodies, stream chunks, logprobs, usage.

A stream's chunk is a prebuilt prefix, the text and a prebuilt suffix: the JSON library sees nothing
but the text. Two shapes (chat, completions) share one class and differ in a few small methods.
Knows no HTTP. Format: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from services.gateway.front.answers import Delta, Usage
from services.gateway.text.text_model import TextModel
from shared.request import FinishReason, TokenLogprobs

FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

DONE = b"data: [DONE]\n\n"

_LOWEST_LOGPROB = -9999.0
"""OpenAI's word for "as good as impossible": JSON has no minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every chunk of an answer repeats. created: unix seconds."""

    id: str
    model: str
    created: int


@dataclass(slots=True)
class _Collected:
    """One whole answer."""

    texts: list[str] = field(default_factory=lambda: [])
    token_ids: list[int] = field(default_factory=lambda: [])
    logprobs: list[TokenLogprobs] = field(default_factory=lambda: [])
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason = FinishReason.NONE
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class AnswerFormat:
    """Writes one request's answers; base of the two shapes.

    has_logprobs: whether the client asked for them. usage_field: whether chunks have a ``usage``
    (null but in the last).
    continuous_usage: whether every chunk has counts.
    """

    object_name = ""
    chunk_name = ""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        *,
        num_choices: int,
        has_logprobs: bool = False,
        usage_field: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._head = head
        self._text = text
        self._num_choices = num_choices
        self._has_logprobs = has_logprobs
        self.continuous_usage = continuous_usage
        self._begun: set[int] = set()
        self._usage_field = usage_field

    # --- what every chunk has: made for the first one, and not where there is none --------------

    @cached_property
    def _opening(self) -> bytes:
        return b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            orjson.dumps(self._head.id),
            orjson.dumps(self.chunk_name),
            self._head.created,
            orjson.dumps(self._head.model),
        )

    @cached_property
    def _ending(self) -> bytes:
        return b'],"usage":null}\n\n' if self._usage_field else b"]}\n\n"

    @cached_property
    def _prefixes(self) -> list[bytes]:
        return [self._opening + self._choice_prefix(index) for index in range(self._num_choices)]

    @cached_property
    def _suffix(self) -> bytes:
        return self._choice_suffix + b',"logprobs":null,"finish_reason":null}'

    # --- streams --------------------------------------------------------------------------------

    def chunks(self, deltas: Sequence[Delta], usage: Usage | None) -> bytes:
        """Return the events of these deltas, b'' if they show nothing yet.

        usage: counts so far if they go into every chunk, else None.
        """
        events: list[bytes] = []
        ending = self._ending
        if usage is not None:
            ending = b'],"usage":%s}\n\n' % orjson.dumps(usage_body(usage))
        for delta in deltas:
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                events += (event + ending for event in self._first_events(delta))
            is_last = delta.finish_reason is not FinishReason.NONE
            shows_logprobs = self._has_logprobs and bool(delta.token_ids)
            if is_last or shows_logprobs:
                events.append(self._full_event(delta) + ending)
            elif delta.text:
                prefix = self._prefixes[delta.choice]
                events.append(prefix + orjson.dumps(delta.text) + self._suffix + ending)
        return b"".join(events)

    def closing(self, usage: Usage | None, receipts: Sequence[dict[str, Any]]) -> bytes:
        """Return the end of a stream: the chunk without choices, if usage or receipts were asked
        for, and [DONE]."""
        if usage is None and not receipts:
            return DONE
        fields: dict[str, Any] = {} if usage is None else {"usage": usage_body(usage)}
        fields |= receipt_fields(receipts)
        return self._opening + b"]," + orjson.dumps(fields)[1:] + b"\n\n" + DONE

    def _full_event(self, delta: Delta) -> bytes:
        fields = {
            "logprobs": self._logprobs(delta) if self._has_logprobs else None,
            "finish_reason": FINISH_NAMES.get(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        prefix = self._prefixes[delta.choice]
        rest = orjson.dumps(fields)[1:]
        return prefix + orjson.dumps(delta.text) + self._choice_suffix + b"," + rest

    # --- whole bodies ---------------------------------------------------------------------------

    def body(
        self, deltas: Sequence[Delta], usage: Usage, receipts: Sequence[dict[str, Any]]
    ) -> bytes:
        """Return the answer of a request without streaming, from all of its deltas."""
        collected = [_Collected() for _ in range(self._num_choices)]
        for delta in deltas:
            collected[delta.choice].add(delta)
        choices = [
            {
                "index": index,
                **self._content(index, answer),
                "finish_reason": FINISH_NAMES.get(answer.finish_reason),
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(collected)
        ]
        return orjson.dumps(
            {
                "id": self._head.id,
                "object": self.object_name,
                "created": self._head.created,
                "model": self._head.model,
                "choices": choices,
                "usage": usage_body(usage),
                **receipt_fields(receipts),
            }
        )

    # --- where the shapes differ ----------------------------------------------------------------

    _choice_suffix = b""

    def _choice_prefix(self, index: int) -> bytes:
        raise NotImplementedError

    def _first_events(self, delta: Delta) -> list[bytes]:
        """What comes before an answer's first text; events without their ending."""
        raise NotImplementedError

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _content(self, index: int, answer: _Collected) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(AnswerFormat):
    """``chat.completion`` and ``chat.completion.chunk``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _choice_suffix = b"}"

    def _choice_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _first_events(self, delta: Delta) -> list[bytes]:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""' % delta.choice
        return [self._opening + role + self._suffix]

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return self._entries(delta.token_ids, delta.logprobs or ())

    def _content(self, index: int, answer: _Collected) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(answer.texts), "refusal": None}
        logprobs = self._entries(answer.token_ids, answer.logprobs) if self._has_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _entries(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        content = [
            {
                **self._entry(token_id, entry.logprob),
                "top_logprobs": [self._entry(*alternative) for alternative in entry.top],
            }
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._text.piece(token_id)
        return {"token": piece.text, "logprob": _number(logprob), "bytes": list(piece.data)}


class CompletionFormat(AnswerFormat):
    """``text_completion``, whole and in chunks.

    echo: for each answer its prompt (ids, text), which then comes first; None = not asked for.
    """

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        *,
        echo: Sequence[tuple[Sequence[int], str]] | None = None,
        num_choices: int,
        has_logprobs: bool = False,
        usage_field: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        super().__init__(
            head,
            text,
            num_choices=num_choices,
            has_logprobs=has_logprobs,
            usage_field=usage_field,
            continuous_usage=continuous_usage,
        )
        self._echo = echo
        self._columns = [_LogprobColumns(text) for _ in range(num_choices)]

    def _choice_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _first_events(self, delta: Delta) -> list[bytes]:
        if self._echo is None:
            return []
        token_ids, text = self._echo[delta.choice]
        prefix = self._prefixes[delta.choice]
        if not self._has_logprobs:
            return [prefix + orjson.dumps(text) + self._suffix]
        columns = self._columns[delta.choice].take(token_ids, delta.prompt_logprobs or ())
        rest = orjson.dumps({"logprobs": columns, "finish_reason": None})[1:]
        return [prefix + orjson.dumps(text) + b"," + rest]

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return self._columns[delta.choice].take(delta.token_ids, delta.logprobs or ())

    def _content(self, index: int, answer: _Collected) -> dict[str, Any]:
        text = "".join(answer.texts)
        token_ids: list[int] = answer.token_ids
        logprobs: list[TokenLogprobs] = answer.logprobs
        if self._echo is not None:
            prompt_ids, prompt_text = self._echo[index]
            text = prompt_text + text
            token_ids = [*prompt_ids, *token_ids]
            logprobs = [*(answer.prompt_logprobs or ()), *logprobs]
        columns = self._columns[index].take(token_ids, logprobs) if self._has_logprobs else None
        return {"text": text, "logprobs": columns}


class _LogprobColumns:
    """The completions format of logprobs: four parallel lists, with offsets into the text."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._offset = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the columns of further tokens."""
        names: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float | None] | None] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            piece = self._text.piece(token_id)
            names.append(piece.completion_name)
            offsets.append(self._offset)
            self._offset += len(piece.text)
            value = _number(entry.logprob)
            values.append(value)
            tops.append(None if value is None else self._top(token_id, entry))
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        # Most likely first, so of two tokens with one name the likelier stays.
        for other_id, logprob in entry.top:
            top.setdefault(self._text.piece(other_id).completion_name, _number(logprob))
        top.setdefault(self._text.piece(token_id).completion_name, _number(entry.logprob))
        return top


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def receipt_fields(receipts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the body's fields for receipts: ``receipt``, and ``receipts`` if there are several
    answers."""
    fields: dict[str, Any] = {}
    if receipts:
        fields["receipt"] = receipts[0]
    if len(receipts) > 1:
        fields["receipts"] = list(receipts)
    return fields


def _number(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(logprob, _LOWEST_LOGPROB)
