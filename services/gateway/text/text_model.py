"""Text on one side, token ids on the other: the tokenizer and chat template of the served model,
loaded once.

Small texts are handled in place; large ones on a thread, so that one long prompt does not hold up
the streams of all others. Knows no requests; decoding of answers is in ``detokenizer.py``.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

from tokenizers import Tokenizer

from services.gateway.text.chat_template import AS_USUAL, ChatTemplate, Rendering
from services.gateway.text.detokenizer import (
    AnswerText,
    ByteDetokenizer,
    StreamDetokenizer,
    WholeTexts,
)
from services.gateway.text.grammars import Grammars
from services.gateway.text.template_process import ClientTemplates
from services.gateway.text.turn_cache import TurnCache
from shared.errors import InvalidRequest, Overloaded
from shared.model_folder import ModelFolder, SpecialTokens
from shared.request import SamplingParams

INLINE_CHARS = 4096
"""Texts up to this length are tokenized on the loop: about a millisecond."""

MAX_OFFLOADED = 256
"""Large texts that may wait for a thread, unless it is said otherwise; more are refused."""

LARGE_CHARS = 256 << 10
"""Larger ones are tokenized one at a time: the library takes up to 280 times a text's bytes, of
4 MiB more than 1 GB."""

_NUM_THREADS = 2
_MARK = re.compile(r"<[\w/|-]+>", re.ASCII)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)

# Batches are computed by the thread that asks, not by some of the library's own.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

T = TypeVar("T")

NO_SPECIAL_TOKENS = SpecialTokens()


class TokenPiece(NamedTuple):
    """One token by itself. text: U+FFFD where its bytes are no whole character."""

    text: str
    data: bytes

    @property
    def completion_name(self) -> str:
        """The token's name in the completions format, which has no bytes field."""
        if "\ufffd" not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TextModel:
    """The tokenizer and chat template of one model.

    chat_template: None = this model has none, and chat requests are refused unless they bring one.
    special_tokens: what such a one is told. max_offloaded: large texts that may wait. Close it at
    the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        special_tokens: SpecialTokens = NO_SPECIAL_TOKENS,
        grammars: Grammars | None = None,
        *,
        max_offloaded: int = MAX_OFFLOADED,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._client_templates = ClientTemplates(special_tokens)
        self._byte_of_char = byte_alphabet() if _is_byte_level(tokenizer) else None
        self._pieces: dict[int, TokenPiece] = {}  # bounded by the vocabulary
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)
        self._whole = (
            {skip: WholeTexts(tokenizer, skip_special=skip) for skip in (True, False)}
            if WholeTexts.is_for(tokenizer)
            else {}
        )
        self.grammars = grammars or Grammars()
        self.grammars.marks = _marks(tokenizer)
        self._turns = TurnCache(tokenizer, self.template or "")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self._num_offloaded = 0
        self._max_offloaded = max_offloaded

    @classmethod
    def load(
        cls, folder: ModelFolder, *, template: str | None = None, max_offloaded: int = MAX_OFFLOADED
    ) -> TextModel:
        """Load from a model folder. template: instead of its own.

        Raises ModelError: no or malformed tokenizer.json, or a malformed chat template.
        """
        source, special_tokens = template or folder.chat_template, folder.special_tokens
        chat_template = None if source is None else ChatTemplate(source, special_tokens)
        return cls(
            folder.read_tokenizer(), chat_template, special_tokens, max_offloaded=max_offloaded
        )

    def close(self) -> None:
        """Stop the threads; a text in progress is finished first."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()
        self._client_templates.close()

    def name_marks(self, *texts: str) -> None:
        """Have grammars know the tokens within texts by their ids: special ones are no text, and
        not every token has a name that a grammar may have."""
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if any(token.content in text for text in texts):
                self.grammars.marks.setdefault(token.content, f"<[{token_id}]>")

    @property
    def template(self) -> str | None:
        """The chat template as it was written; None = there is none."""
        return None if self._chat_template is None else self._chat_template.source

    async def encode_chat(self, text: str, owner: bytes) -> list[int]:
        """Return the ids of a rendered conversation; owner: see ``TurnCache.encode``. Raises
        Overloaded: too many large texts wait already."""
        if len(text) <= INLINE_CHARS:
            return await self.encode(text, add_special_tokens=False)
        return await self.offload(lambda: self._turns.encode(text, owner), len(text))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text, likewise."""
        (ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the ids of each of some texts, likewise."""

        def run() -> list[list[int]]:
            # For batches alone does the library release the GIL.
            encode = self._tokenizer.encode_batch_fast
            return [encode([text], add_special_tokens=add_special_tokens)[0].ids for text in texts]

        return await self.offload(run, sum(map(len, texts)))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = AS_USUAL
    ) -> str:
        """Return the prompt text of a chat.

        Raises InvalidRequest: see ``ChatTemplate.render`` and ``ClientTemplates.render``.
        Overloaded: too many large texts, or clients' templates, wait already.
        """
        if rendering.chat_template is not None:
            return await self._client_templates.render(messages, rendering)
        own = self._chat_template
        if own is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions", param="messages"
            )

        given = [messages, rendering.tools, rendering.arguments]
        return await self.offload(lambda: own.render(messages, rendering), _size(given))

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of words as vLLM takes them: as at the beginning of a text,
        and after a space where that only changes the first token."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip()
            first, spaced = (
                tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
                for text in (bare, " " + bare)
            )
            found.append(first)
            if len(spaced) == len(first) and spaced[:1] != first[:1]:
                found.append(spaced)
        return tuple(dict.fromkeys(word for word in found if word))

    async def decode_all(
        self, prompts: Sequence[Sequence[int]], *, skip_special: bool
    ) -> list[str]:
        """Return the text of each of some lists of ids; ids that the tokenizer does not know give
        nothing. Raises Overloaded: see ``encode_chat``."""

        def run() -> list[str]:
            lists = list(map(list, prompts))
            return self._tokenizer.decode_batch(lists, skip_special_tokens=skip_special)

        return await self.offload(run, sum(map(len, prompts)))

    def new_answer(
        self,
        sampling: SamplingParams,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> AnswerText:
        """Return the decoder of one answer; see ``detokenizer.py`` for the arguments."""
        whole = self._whole.get(skip_special)
        return AnswerText(
            ByteDetokenizer(whole, prompt_tail=prompt_tail)
            if whole is not None
            else StreamDetokenizer(
                self._tokenizer, skip_special=skip_special, prompt_tail=prompt_tail
            ),
            stop=stop,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            include_stop=include_stop,
        )

    def is_special(self, token_id: int) -> bool:
        """Whether answers do not show a token, unless they are asked to."""
        return token_id in self._special

    def piece(self, token_id: int) -> TokenPiece:
        """Return one token's own text and bytes, special tokens by name."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> TokenPiece:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a padding row of the embedding
            return TokenPiece("", b"")
        table = self._byte_of_char
        byte_token = _BYTE_TOKEN.fullmatch(token)
        if table is not None and all(char in table for char in token):
            data = bytes(table[char] for char in token)
        elif byte_token is not None:
            data = bytes.fromhex(byte_token[1])
        else:
            data = (token if table is not None else token.replace("\u2581", " ")).encode()
        return TokenPiece(data.decode("utf-8", "replace"), data)

    async def offload(self, run: Callable[[], T], size: int) -> T:
        """Run what needs no loop: here if it is small, else on a thread. Raises Overloaded."""
        if size <= INLINE_CHARS:
            return run()
        if self._num_offloaded >= self._max_offloaded:
            raise Overloaded("too many long prompts are being tokenized", retry_after_s=1.0)
        self._num_offloaded += 1
        loop = asyncio.get_running_loop()
        try:
            if size > LARGE_CHARS:
                return await loop.run_in_executor(self._large, _then_trimmed, run)
            return await loop.run_in_executor(self._threads, run)
        finally:
            self._num_offloaded -= 1


def _then_trimmed(run: Callable[[], T]) -> T:
    """Run it, and give back to the system what the library has freed: of 1.1 GB that 4 MiB took
    glibc keeps 700 MB."""
    try:
        return run()
    finally:
        if _trim is not None:
            _trim(0)


def _size(value: object) -> int:
    """Return about how many characters a JSON value has; of a large one only that it is large."""
    parts, size = [value], 0
    while parts and size <= INLINE_CHARS:
        part = parts.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            parts += cast("Mapping[str, object]", part).values()
        elif isinstance(part, Sequence):
            parts += cast("Sequence[object]", part)
        size += 8
    return size


def _marks(tokenizer: Tokenizer) -> dict[str, str]:
    """Tokens that were added for what answers show, such as ``<tool_call>``; as grammars have
    them."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {
        one.content: one.content
        for one in added
        if not one.special and _MARK.fullmatch(one.content)
    }


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens are written in the byte alphabet of GPT-2."""
    if tokenizer.decoder is None:
        return False
    decoder: dict[str, Any] = json.loads(cast("bytes", tokenizer.decoder.__getstate__()))
    parts = cast("list[dict[str, Any]]", decoder.get("decoders") or [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved
    to U+0100 and up.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), the released
    encoder.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    moved = [byte for byte in range(0x100) if byte not in set(plain)]
    table.update({chr(0x100 + position): byte for position, byte in enumerate(moved)})
    return table
