"""The prompts of a workload: token ids, or words where a server takes no ids.

Equal block ids give equal tokens, everything else differs by ``seed``: two runs with different
seeds share no prefix, so that no cache helps the second one. Pure.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from services.cli.bench.workload import Ask, Workload

T = TypeVar("T", int, str)
_Draw = Callable[[str, int], list[T]]

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
    _blocks: dict[Any, list[Any]] = field(default_factory=dict[Any, "list[Any]"])

    def ids(self, index: int) -> list[int]:
        """Return the token ids of request ``index``, exactly ``num_input`` of them."""
        num_tokens = self.workload.asks[index].num_input
        return self._filled(index, num_tokens, self.workload.block_tokens, self._draw_ids)

    def text(self, index: int) -> str:
        """Return words that are about ``num_input`` tokens."""
        num_words = self._num_words(self.workload.asks[index].num_input)
        size = self._num_words(self.workload.block_tokens)
        return " ".join(self._filled(index, num_words, size, self._draw_words))

    def _filled(self, index: int, wanted: int, size: int, draw: _Draw[T]) -> list[T]:
        """The shared blocks of a request, as far as they go, then what is its own."""
        found: list[T] = []
        for block_id in self.workload.asks[index].block_ids[: -(-wanted // size)]:
            # Servers that share these prompts may be asked in ids the one, in words the other.
            key = draw.__name__, block_id
            if key not in self._blocks:
                self._blocks[key] = draw(f"block {block_id}", size)
            found += self._blocks[key]
        if wanted > len(found):
            found += draw(f"own {index}", wanted - len(found))
        return found[:wanted]

    def _num_words(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self.tokens_per_word))

    def _draw_ids(self, name: str, count: int) -> list[int]:
        numbers = array("I")
        numbers.frombytes(self._rng(name).randbytes(numbers.itemsize * count))
        smallest = min(SMALLEST_ID, self.vocab // 2)
        return [smallest + number % (self.vocab - smallest) for number in numbers]

    def _draw_words(self, name: str, count: int) -> list[str]:
        return self._rng(name).choices(WORDS, k=count)

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")


def one_prompt(num_tokens: int, seed: int, vocab: int = DEFAULT_VOCAB) -> Prompts:
    """Return the prompts of a workload of one request, for probing."""
    ask = Ask(num_input=num_tokens, num_output=1)
    return Prompts(Workload(name="probe", asks=(ask,)), seed, vocab)
