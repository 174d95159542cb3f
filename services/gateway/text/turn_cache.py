"""Ids of long prompts, put together from pieces that were tokenized before.

A turn of a conversation repeats all that came before it: of the time to a first token at 200,000
tokens most went to text that had been tokenized a moment ago. A tokenizer looks for its added
tokens first, and takes what stands between two of them by itself. So a prompt may be cut where one
of them begins, and its ids are those of the pieces.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Final

from tokenizers import AddedToken, Tokenizer

MAX_IDS: Final = 4 << 20
"""That are kept, of 4 bytes each: some twenty conversations of 200,000 tokens."""

LEAST_CHARS: Final = 512
"""A piece has as many at least: keeping shorter ones saves nothing."""


class TurnCache:
    """The pieces that were used last. Threads may share it.

    template: prompts are cut at added tokens that it names, for these begin turns. least_chars: of
    a piece.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str, *, least_chars: int = LEAST_CHARS
    ) -> None:
        self._least_chars = least_chars
        self._tokenizer = tokenizer
        # Others are looked for in what is between these.
        added = [it for it in tokenizer.get_added_tokens_decoder().values() if not it.normalized]
        self._cuts = [it.content for it in added if it.content in template and _cuts(it, added)]
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_ids = 0
        self._lock = Lock()

    def encode(self, text: str, owner: bytes) -> list[int]:
        """Return the ids of a text, without a template's special tokens.

        owner: without a zero; nobody else's pieces make it quicker, for that would tell what they
        wrote.
        """
        pieces = self._pieces(text)
        keys = [blake2b(owner + b"\0" + it.encode(), digest_size=16).digest() for it in pieces]
        with self._lock:
            known = {key: self._kept[key] for key in keys if key in self._kept}
            for key in known:
                self._kept.move_to_end(key)
        missing = {key: it for key, it in zip(keys, pieces, strict=True) if key not in known}
        if missing:
            # For batches alone does the library release the GIL.
            encoded = self._tokenizer.encode_batch_fast(
                [*missing.values()], add_special_tokens=False
            )
            new = {key: array("I", it.ids) for key, it in zip(missing, encoded, strict=True)}
            known |= new
            self._keep(new.items())
        return [token_id for key in keys for token_id in known[key]]

    def _pieces(self, text: str) -> Sequence[str]:
        starts = [0]
        for place in sorted(place for cut in self._cuts for place in _places(cut, text)):
            if place - starts[-1] >= self._least_chars:
                starts.append(place)
        return [
            text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)
        ]

    def _keep(self, new: Iterable[tuple[bytes, array[int]]]) -> None:
        with self._lock:
            for key, ids in new:
                self._num_ids += len(ids) - len(self._kept.get(key, ()))
                self._kept[key] = ids
            while self._num_ids > MAX_IDS:
                self._num_ids -= len(self._kept.popitem(last=False)[1])


def _places(cut: str, text: str) -> Iterable[int]:
    place = text.find(cut)
    while place >= 0:
        yield place
        place = text.find(cut, place + len(cut))


def _cuts(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """Whether the text before a token and the text from it on have their ids each by itself,
    wherever it stands: nothing before it hangs on what it is, and no other added token that is
    found instead holds its beginning."""
    text = token.content
    if (
        token.lstrip
        or token.single_word
        or text[0].isspace()
        or text[0].isalnum()
        or text[0] == "_"
    ):
        return False
    begins = [text[:end] for end in range(1, len(text))]
    return not any(
        other.content.endswith(begin) for other in added for begin in begins
    ) and not any(text in other.content for other in added if other.content != text)
