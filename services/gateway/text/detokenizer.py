"""Token ids in, text out, one token at a time: characters that span tokens, and stop strings that
do.

Everything here steps per token, so the text of an answer does not depend on how its tokens were
batched: the streamed pieces joined are the text of the same request without streaming. Pure
computation; knows no requests and no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from services.gateway.text.calls.parser import num_begun
from shared.request import AnswerToken, FinishReason

PROMPT_TAIL = 8
"""Prompt tokens that an answer's decoder starts from, where the answer continues the prompt's text:
decoders in the style of sentencepiece drop the space before the first word they see."""

MAX_CHAR_BYTES = 4
MAX_UNFINISHED = 2 * MAX_CHAR_BYTES
"""Tokens without a whole character that are kept without another look."""


class WholeTexts(dict[int, "str | None"]):
    """Texts of single tokens, found when first asked for; None: the token is no whole characters.

    Only for tokenizers whose decoder puts bytes together and does nothing else (``is_for``): a
    token that is whole characters has one text there wherever others end before it, and looking it
    up costs a fraction of decoding it. Bounded by the ids that workers sample.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special = skip_special

    @staticmethod
    def is_for(tokenizer: Tokenizer) -> bool:
        """Whether the decoder is byte-level BPE's alone (GPT-2, Llama 3, Qwen), which maps each
        token's characters to bytes."""
        return isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        found = self[token_id] = None if "\ufffd" in text else text
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


class ByteDetokenizer:
    """Decodes one answer where tokens are bytes: only those of unfinished characters are decoded.

    A piece is given out only when all bytes of its characters are there.

    prompt_tail: the prompt's last tokens, when the answer continues its text. If they end inside a
    character the answer finishes it.
    """

    def __init__(self, whole: WholeTexts, *, prompt_tail: Sequence[int] = ()) -> None:
        self._whole = whole
        begin = len(prompt_tail)
        while begin and not whole[prompt_tail[begin - 1]]:  # part of one, or without text
            begin -= 1
        self._unfinished = list(prompt_tail[begin:])
        self._told = whole.decode(self._unfinished) if self._unfinished else ""
        if not self._told.endswith("\ufffd"):
            self._unfinished, self._told = [], ""

    def step(self, token_id: int) -> str:
        """Return the text that this token completes, often ''."""
        text = self._whole[token_id]
        # One without text, as a special one that is left out, does not end what is unfinished.
        if text == "" or (text is not None and not self._unfinished):
            return text
        self._unfinished.append(token_id)
        text = self._whole.decode(self._unfinished)
        if not text.endswith("\ufffd"):
            return self._give_out(text)
        return self._give_up(text) if len(self._unfinished) > MAX_UNFINISHED else ""

    def flush(self) -> str:
        """Return what ``step`` still holds back, with U+FFFD for what is incomplete, as in a full
        decode; call once, at the end."""
        return self._give_out(self._whole.decode(self._unfinished)) if self._unfinished else ""

    def _give_up(self, text: str) -> str:
        """Return what is no character and will be none: ``text`` but for its last tokens, where
        these by themselves are its end. Else a run of broken bytes costs the square of its length,
        and is not seen before it ends."""
        ids = self._unfinished
        for num_kept in range(1, MAX_CHAR_BYTES):
            broken, kept = self._whole.decode(ids[:-num_kept]), ids[-num_kept:]
            if broken + self._whole.decode(kept) == text:
                text = self._give_out(broken)
                self._unfinished = kept
                return text
        return ""

    def _give_out(self, text: str) -> str:
        """Return what ``text`` adds to what an unfinished prompt had said by itself."""
        told, self._told = self._told, ""
        self._unfinished.clear()
        return text[_num_same(told, text) :]


class StreamDetokenizer:
    """Decodes one answer of any tokenizer likewise, by the library's stream."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, prompt_tail: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._given = list(prompt_tail)  # tokens of the last text that was given out
        self._pending: list[int] = []  # those that came since
        told = self._decode(self._given) if prompt_tail else ""
        # Else the stream tells all that came before an unfinished character along with it.
        self._told = told if told.endswith("\ufffd") else ""
        self._stream = self._new_stream(self._given)

    def _new_stream(self, ids: list[int]) -> DecodeStream:
        return DecodeStream(ids=ids or None, skip_special_tokens=self._skip_special)

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The library raises a bare Exception when a decoder rewrites text that it had already
            # given out (huggingface/tokenizers: "Invalid prefix encountered"). Start afresh after
            # what is pending.
            piece = self._rest()
            self._stream = self._new_stream(self._pending)
        if not piece:
            return ""
        self._given, self._pending = self._pending, []
        return self._new(piece)

    def flush(self) -> str:
        return self._rest() if self._pending else ""

    def _rest(self) -> str:
        text = self._decode(self._given + self._pending)
        if self._told:
            return self._new(text)
        given = len(self._decode(self._given))
        # A broken byte breaks whole characters before it, which were given out.
        return self._decode(self._pending) if "\ufffd" in text[:given] else text[given:]

    def _new(self, text: str) -> str:
        """Return what is new in the first text, which begins with the prompt's."""
        told, self._told = self._told, ""
        return text[_num_same(told, text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)


Detokenizer = ByteDetokenizer | StreamDetokenizer


def _num_same(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


class StopMatcher:
    """Finds the stop string that is complete first, and holds back text that may be the beginning
    of one.

    Of two that are complete at the same character the longer wins. Both rules do not depend on how
    the text is cut into pieces. With no stop strings, text passes straight through.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Return (text that is safe to give out, the stop string found or None); feed nothing after
        a match."""
        if not self._stop:
            return piece, None
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, stop = found
            self._held = ""
            return text[: end if self._include else start], stop
        return self._hold(text), None

    def pass_over(self, piece: str) -> str:
        """Return text that is safe to give out; a stop string that is complete in it is none."""
        return self._hold(self._held + piece) if self._stop else piece

    def _hold(self, text: str) -> str:
        num_held = max(num_begun(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the held text: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """Text of one answer: decoder, then stop strings.

    min_tokens: stop strings that are complete before the answer has this many tokens do not count.
    include_stop: keep the stop string, or the text of the token that ended the answer, in the text.

    Of the answer so far: num_tokens belong to it (fewer than were given if a stop string ended it);
    finish_reason is STOP if a stop string or a token ended it; stop_reason is that string or token
    id, None for an end-of-sequence token.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._step_of = detokenizer.step
        self._matcher = StopMatcher(stop, include=include_stop)
        self.has_stop = bool(stop)
        """Whether text can end the answer: there are stop strings."""
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.num_tokens = 0
        self.finish_reason = FinishReason.NONE
        self.stop_reason: str | int | None = None

    def feed(self, tokens: Sequence[AnswerToken]) -> str:
        """Take tokens, at least one, and return the text that they give; the answer may be over
        then."""
        finish_reason = tokens[-1].finish_reason
        if not finish_reason and not self.has_stop:
            self.num_tokens += len(tokens)
            if len(tokens) == 1:
                return self._step_of(tokens[0].token_id)
            return "".join([self._step_of(token.token_id) for token in tokens])
        pieces: list[str] = []
        for token in tokens:
            self.num_tokens += 1
            if token.finish_reason is FinishReason.STOP:
                self.stop_reason = (
                    token.token_id if token.token_id in self._stop_token_ids else None
                )
                if not self._include_stop:
                    continue
            text, found = self._step(token.token_id)
            pieces.append(text)
            if found is not None:
                return self._stopped(pieces, found)
        if finish_reason:
            # What the decoder still held may complete a stop string, or end inside one.
            text, found = self._matcher.feed(self._detokenizer.flush())
            pieces += (text, self._matcher.flush())
            if found is not None:
                return self._stopped(pieces, found)
            self.finish_reason = finish_reason
        return "".join(pieces)

    def _stopped(self, pieces: list[str], stop: str) -> str:
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return "".join(pieces)

    def _step(self, token_id: int) -> tuple[str, str | None]:
        piece = self._detokenizer.step(token_id)
        if self.num_tokens < self._min_tokens:
            return self._matcher.pass_over(piece), None
        return self._matcher.feed(piece)
