"""Answers in the shapes of the OpenAI API: whole bodies, stream chunks, logprobs, usage.

All are encoded from ``bodies.py``. A chunk that is nothing but text, which nearly every one is, is
that text between two pieces encoded beforehand. Two shapes (chat, completions) share one class and
differ in a few small methods. Knows no HTTP. Format:
https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import Choice, TextDelta, TokenCounts
from services.gateway.http import bodies
from services.gateway.http.openai_forms import StreamOptions
from services.gateway.text.text_model import TextModel
from shared.errors import MeshError
from shared.request import FinishReason, TokenLogprobs

FINISH_NAMES: Final[dict[FinishReason, bodies.FinishName]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

_NO_OPTIONS = StreamOptions()

DONE = b"data: [DONE]\n\n"

_LOWEST_LOGPROB = -9999.0
"""OpenAI's word for "as good as impossible": JSON has no minus infinity."""

_encode = msgspec.json.Encoder().encode
_MARK = "\x00"
"""Stands for the text of a chunk; as JSON it is an escape, which no name of a model contains."""


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class AnswerHead:
    """What every chunk of an answer repeats. created: unix seconds."""

    id: str
    model: str
    created: int


class AnswerFormat(ABC):
    """Writes one request's answers; base of the two shapes.

    continuous_usage: whether every chunk has counts; else, if they are asked for, the last one
    alone, and the others have null.
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    whole: ClassVar[Any]
    chunk: ClassVar[Any]
    choice: ClassVar[Any]
    chunk_choice: ClassVar[Any]
    new_text: ClassVar[Any]
    """How a chunk holds its text."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        choices: Sequence[Choice],
        options: StreamOptions | None,
    ) -> None:
        options = options or _NO_OPTIONS
        self._head = head
        self._text = text
        self._num_choices = len(choices)
        self._has_logprobs = choices[0].request.sampling.logprobs is not None
        self.continuous_usage = bool(options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._no_usage: UnsetType | None = None if options.include_usage else UNSET
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    # --- streams --------------------------------------------------------------------------------

    def chunks(self, delta: TextDelta, usage: TokenCounts | None) -> bytes:
        """Return the events of a delta, b'' if it shows nothing yet.

        usage: counts so far if they go into every chunk, else None.
        """
        choice, text = delta.choice, delta.text
        plain = self._plain.get(choice)
        if plain is not None and not delta.finish_reason:
            return b"".join((plain[0], _encode(text), plain[1])) if text else b""
        counts = None if usage is None else self._usage(usage)
        events = b""
        if choice not in self._begun:
            self._begun.add(choice)
            if (first := self._first(delta)) is not None:
                events = self._event(first, counts)
            # With counts or logprobs in them no two chunks are alike.
            if counts is None and not self._has_logprobs:
                self._cut(choice)
        if delta.finish_reason or (self._has_logprobs and delta.tokens):
            logprobs = self._logprobs(delta) if self._has_logprobs else None
            last = (logprobs, FINISH_NAMES.get(delta.finish_reason), delta.stop_reason)
            content = self.new_text(text)
            return events + self._event(self.chunk_choice(choice, content, *last), counts)
        return events + self._event(self._plain_choice(choice, text), counts) if text else events

    def closing(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        """Return the end of a stream: the chunk without choices, if usage or receipts were asked
        for, and [DONE]."""
        if self._no_usage is UNSET and not receipts:
            return DONE
        counts = UNSET if self._no_usage is UNSET else self._usage(usage)
        return self._data([], usage=counts, **_receipts(receipts)) + DONE

    def failed(self, error: MeshError) -> bytes:
        """Return the end of a stream that broke: the error, and no [DONE]."""
        return b"data: %b\n\n" % _encode(bodies.ErrorBody.of(error))

    def _event(self, choice: Any, usage: bodies.UsageBody | None) -> bytes:
        return self._data([choice], usage=self._no_usage if usage is None else usage)

    def _data(self, choices: list[Any], **fields: Any) -> bytes:
        chunk = self.chunk(object=self.chunk_name, choices=choices, **self._named(), **fields)
        return b"data: " + _encode(chunk) + b"\n\n"

    def _cut(self, index: int) -> None:
        """Note what stands before and after the text of this answer's chunks, which are nothing but
        text until its last."""
        event = self._event(self._plain_choice(index, _MARK), None)
        before, _, after = event.partition(_encode(_MARK))
        self._plain[index] = before, after

    # --- whole bodies ---------------------------------------------------------------------------

    def body(
        self,
        deltas: Sequence[TextDelta],
        usage: TokenCounts,
        receipts: Sequence[dict[str, Any]],
    ) -> bytes:
        """Return the answer of a request without streaming, from all of its deltas."""
        parts: list[list[TextDelta]] = [[] for _ in range(self._num_choices)]
        for delta in deltas:
            parts[delta.choice].append(delta)
        return _encode(
            self.whole(
                object=self.object_name,
                choices=[self._whole_choice(_joined(one)) for one in parts],
                usage=self._usage(usage),
                **self._named(),
                **_receipts(receipts),
            )
        )

    def _plain_choice(self, index: int, text: str) -> Any:
        return self.chunk_choice(index, self.new_text(text), None, None)

    def _whole_choice(self, answer: TextDelta) -> Any:
        name = FINISH_NAMES[answer.finish_reason]
        return self.choice(answer.choice, *self._content(answer), name, answer.stop_reason)

    def _named(self) -> dict[str, Any]:
        return {"id": self._head.id, "created": self._head.created, "model": self._head.model}

    # --- where the shapes differ ----------------------------------------------------------------

    def _usage(self, counts: TokenCounts) -> bodies.UsageBody:
        return bodies.UsageBody.of(counts)

    @abstractmethod
    def _first(self, delta: TextDelta) -> Any | None:
        """What comes before an answer's first text."""
        ...

    @abstractmethod
    def _logprobs(self, delta: TextDelta) -> Any: ...

    @abstractmethod
    def _content(self, answer: TextDelta) -> tuple[Any, Any]:
        """What a whole answer says, and its logprobs."""
        ...


class ChatFormat(AnswerFormat):
    """``chat.completion`` and ``chat.completion.chunk``."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    whole = bodies.ChatCompletion
    chunk = bodies.ChatCompletionChunk
    choice = bodies.ChatChoice
    chunk_choice = bodies.ChatChunkChoice
    new_text = bodies.DeltaBody

    def _first(self, delta: TextDelta) -> bodies.ChatChunkChoice:
        opening = bodies.DeltaBody("", "assistant")
        return bodies.ChatChunkChoice(delta.choice, opening, None, None)

    def _content(
        self, answer: TextDelta
    ) -> tuple[bodies.AnswerMessage, bodies.ChatLogprobs | None]:
        logprobs = self._logprobs(answer) if self._has_logprobs else None
        return bodies.AnswerMessage("assistant", answer.text, None), logprobs

    def _logprobs(self, delta: TextDelta) -> bodies.ChatLogprobs:
        content = [
            bodies.TokenLogprob(
                *self._entry(token_id, entry.logprob),
                [bodies.TopLogprob(*self._entry(*other)) for other in entry.top],
            )
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        return bodies.ChatLogprobs(content, None)

    def _entry(self, token_id: int, logprob: float) -> tuple[str, float | None, list[int]]:
        piece = self._text.piece(token_id)
        return piece.text, _number(logprob), list(piece.data)


class CompletionFormat(AnswerFormat):
    """``text_completion``, whole and in chunks.

    echo: for each answer its prompt (ids, text), which then comes first; None = not asked for.
    shows_special: answers show special tokens.
    """

    object_name = chunk_name = "text_completion"
    whole = bodies.Completion
    chunk = bodies.CompletionChunk
    choice = bodies.CompletionChoice
    chunk_choice = bodies.CompletionChunkChoice
    new_text = str

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        choices: Sequence[Choice],
        options: StreamOptions | None,
        *,
        echo: Sequence[tuple[Sequence[int], str]] | None = None,
        shows_special: bool = False,
    ) -> None:
        super().__init__(head, text, choices, options)
        self._echo = echo
        self._columns: list[_LogprobColumns] = []
        if self._has_logprobs:
            self._columns = [_LogprobColumns(text, shows_special=shows_special) for _ in choices]

    def _first(self, delta: TextDelta) -> bodies.CompletionChunkChoice | None:
        if self._echo is None:
            return None
        token_ids, text = self._echo[delta.choice]
        columns = None
        if self._has_logprobs:
            logprobs = delta.prompt_logprobs or ()
            columns = self._columns[delta.choice].take(token_ids, logprobs, prompt=text)
        return bodies.CompletionChunkChoice(delta.choice, text, columns, None)

    def _logprobs(self, delta: TextDelta) -> bodies.CompletionLogprobs:
        return self._columns[delta.choice].take(delta.token_ids, delta.logprobs)

    def _content(self, answer: TextDelta) -> tuple[str, bodies.CompletionLogprobs | None]:
        text, first = answer.text, self._first(answer)
        if first is not None:
            text = first.text + text
        if not self._has_logprobs:
            return text, None
        columns = self._logprobs(answer)
        if first is not None and first.logprobs is not None:
            columns = first.logprobs.followed_by(columns)
        return text, columns


class _LogprobColumns:
    """The completions format of logprobs: four parallel lists, with offsets into the text: of a
    character that several tokens make, all begin where it does."""

    def __init__(self, text: TextModel, *, shows_special: bool) -> None:
        self._text = text
        self._shows_special = shows_special
        self._offset = 0
        self._characters = getincrementaldecoder("utf-8")("replace")

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        prompt: str | None = None,
    ) -> bodies.CompletionLogprobs:
        """Return the columns of further tokens. prompt: they are those of this text."""
        names: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float | None] | None] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            piece = self._text.piece(token_id)
            names.append(piece.completion_name)
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(self._shown(token_id, prompt)))
            value = _number(entry.logprob)
            values.append(value)
            tops.append(None if value is None else self._top(token_id, entry))
        return bodies.CompletionLogprobs(names, values, tops, offsets)

    def _shown(self, token_id: int, prompt: str | None) -> bytes:
        """Return what the text has of a token."""
        piece = self._text.piece(token_id)
        if self._text.is_special(token_id):
            # A prompt has those that its client wrote, but not those that come before it.
            is_shown = self._shows_special
            if prompt is not None:
                is_shown = prompt.startswith(piece.text, self._offset)
            return piece.data if is_shown else b""
        # Of a prompt's first word sentencepiece has a space before it that is not in the text.
        is_first = prompt is not None and not self._offset and not prompt.startswith(" ")
        return piece.data.removeprefix(b" ") if is_first else piece.data

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float | None]:
        top: dict[str, float | None] = {}
        # Most likely first, so of two tokens with one name the likelier stays.
        for other_id, logprob in entry.top:
            top.setdefault(self._text.piece(other_id).completion_name, _number(logprob))
        top.setdefault(self._text.piece(token_id).completion_name, _number(entry.logprob))
        return top


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return a whole answer's deltas as one."""
    first, last = deltas[0], deltas[-1]
    text = "".join([delta.text for delta in deltas])
    tokens = [token for delta in deltas for token in delta.tokens]
    ends = last.finish_reason, last.stop_reason
    return TextDelta(first.choice, text, tokens, *ends, first.prompt_logprobs)


def _receipts(receipts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The body's fields for receipts; ``receipts`` only if there are several answers."""
    fields: dict[str, Any] = {}
    if receipts:
        fields["receipt"] = receipts[0]
    if len(receipts) > 1:
        fields["receipts"] = list(receipts)
    return fields


def _number(logprob: float) -> float | None:
    # Not a number: of a prompt's first token, which nothing stands before (``TextDelta``).
    return None if math.isnan(logprob) else max(logprob, _LOWEST_LOGPROB)
