"""The prompts of a workload: token ids, or words where a server takes no ids.

Equal block ids give equal tokens, everything else differs by ``seed``: two runs with different
seeds share no prefix, so that no cache helps the second one. Pure.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Final

from services.cli.bench.workload import Ask, Workload

SMALLEST_ID: Final = 100
"""Below it vocabularies keep their special tokens."""

DEFAULT_VOCAB: Final = 1000
"""Of ids 100..999, which every vocabulary in use has."""

WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line"),
)
"""Common words: most tokenizers have one token for each, with its space."""


@dataclass(slots=True)
class Prompts:
    """Makes the prompts of one workload.

    vocab: ids are below it. tokens_per_word: as measured on the server's tokenizer.
    """

    workload: Workload
    seed: int = 0
    vocab: int = DEFAULT_VOCAB
    tokens_per_word: float = 1.0
    _ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _words: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def ids(self, index: int) -> list[int]:
        """Return the token ids of request ``index``, exactly ``num_input`` of them."""
        ask = self.workload.asks[index]
        size = self.workload.block_tokens
        ids: list[int] = []
        for block_id in ask.block_ids:
            if len(ids) >= ask.num_input:
                break
            if block_id not in self._ids:
                self._ids[block_id] = self._draw_ids(f"block {block_id}", size)
            ids += self._ids[block_id]
        ids += self._draw_ids(f"own {index}", ask.num_input - len(ids))
        return ids[: ask.num_input]

    def text(self, index: int) -> str:
        """Return words that are about ``num_input`` tokens."""
        ask = self.workload.asks[index]
        wanted = self._num_words(ask.num_input)
        size = self._num_words(self.workload.block_tokens)
        words: list[str] = []
        for block_id in ask.block_ids:
            if len(words) >= wanted:
                break
            if block_id not in self._words:
                self._words[block_id] = self._draw_words(f"block {block_id}", size)
            words += self._words[block_id]
        words += self._draw_words(f"own {index}", wanted - len(words))
        return " ".join(words[:wanted])

    def _num_words(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self.tokens_per_word))

    def _draw_ids(self, name: str, count: int) -> list[int]:
        if count <= 0:
            return []
        numbers = array("I")
        numbers.frombytes(self._rng(name).randbytes(numbers.itemsize * count))
        smallest = min(SMALLEST_ID, self.vocab // 2)
        span = self.vocab - smallest
        return [smallest + number % span for number in numbers]

    def _draw_words(self, name: str, count: int) -> list[str]:
        return self._rng(name).choices(WORDS, k=count) if count > 0 else []

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")


def one_prompt(num_tokens: int, seed: int, vocab: int = DEFAULT_VOCAB) -> Prompts:
    """Return the prompts of a workload of one request, for probing."""
    ask = Ask(num_input=num_tokens, num_output=1)
    return Prompts(Workload(name="probe", asks=(ask,)), seed, vocab)
