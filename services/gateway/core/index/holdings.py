"""What workers have of one prompt's beginning, as columns by their places: where 125 of 1,000 have
some of it, they are found, compared and recorded at the cost of a few. Pure; numpy is imported with
this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.gateway.core.index.fetches import Hit

Column: TypeAlias = NDArray[np.float64]


class Holdings(Mapping[int, Hit]):
    """A ``Hit`` for each place that has something. The last number of each column is nobody's, and
    stands for all places beyond it.

    below: columns of what lies in DRAM and on SSDs; None = nothing does.
    """

    __slots__ = ("_below", "in_pool", "tokens")

    def __init__(self, tokens: Column, in_pool: Column, below: tuple[Column, Column] | None = None):
        self.tokens = tokens
        self.in_pool = in_pool
        self._below = below

    @classmethod
    def of(cls, hits: Mapping[int, Hit]) -> Holdings:
        """Return the same as columns."""
        if isinstance(hits, Holdings):
            return hits
        columns = np.zeros((len(Hit._fields), max(hits, default=0) + 2))
        for place, hit in hits.items():
            columns[:, place] = hit
        return cls(columns[0], columns[1], (columns[2], columns[3]))

    def __getitem__(self, place: int) -> Hit:
        if place >= len(self.tokens) or not self.tokens[place]:
            raise KeyError(place)
        columns = (self.tokens, self.in_pool, *(self._below or ()))
        return Hit(*(int(column[place]) for column in columns))

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens.nonzero()[0].tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.tokens))

    def below(self) -> list[int]:
        """Return the places that have some of it below their pools."""
        if self._below is None:
            return []
        in_dram, on_ssd = self._below
        return (in_dram + on_ssd).nonzero()[0].tolist()

    def by_pool(self) -> Iterator[tuple[int, int]]:
        """Go through the places with something in their pools, and how much; most comes first, and
        of equal ones the one that joined last."""
        left = self.in_pool[::-1].copy()
        while num_tokens := left.item(place := int(left.argmax())):
            yield len(left) - 1 - place, int(num_tokens)
            left[place] = 0.0

    def num_tokens(self, place: int) -> int:
        """Return how many tokens one has."""
        return int(self.tokens[min(place, len(self.tokens) - 1)])

    def expect(self, place: int, num_tokens: int, *, is_there: bool) -> None:
        """One will have so many more. is_there: they can be sent, if those before them can."""
        # The index gives one column for both where nothing lies below a pool: now they differ.
        if self.in_pool is self.tokens:
            self.in_pool = self.tokens.copy()
        if is_there and self.in_pool[place] == self.tokens[place]:
            self.in_pool[place] = num_tokens
        self.tokens[place] = num_tokens
