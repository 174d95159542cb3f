"""A line through what was seen: least squares of relative errors, without negative coefficients.

Relative, because a prediction that is 1 ms off is good for a prompt and useless for a token. Not
negative, because nothing that is counted here makes a step or a transfer shorter, and a fit to
noise would otherwise promise that beyond what it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

_RIDGE = 1e-6
"""Of features scaled to 1: all that was seen may have had the same shape."""

_CHEAPER = 1000.0
"""By so much one of two features is taken for the cause, where nothing seen tells them apart."""

_ANCHOR = 10.0
"""So many observations outweigh what was anchored."""


class LeastSquares:
    """Coefficients c >= 0 that make the features' sum c·f come near each value, relative to it.

    keep: weight of the past for each observation; 0.98 = about the last 50 count. in_order: of
    features that always came in one proportion the earlier one is the cause; else they share it.
    """

    def __init__(self, num_features: int, *, keep: float = 0.98, in_order: bool = False) -> None:
        self._num = num_features
        self._keep = keep
        self._ridges = [
            _RIDGE * _CHEAPER ** (i - num_features / 2 if in_order else 0)
            for i in range(num_features)
        ]
        self._places = [(i, j) for i in range(num_features) for j in range(i, num_features)]
        # Sums of products of two features, each over its value, and of the features themselves.
        self._products = [0.0] * len(self._places)
        self._sums = [0.0] * num_features
        self._anchor: tuple[list[float], list[float]] | None = None
        self._count = 0

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take in one value, above 0, and its features, none below 0."""
        keep = self._keep
        shares = [feature / value for feature in features]
        self._products = [
            old * keep + shares[i] * shares[j]
            for old, (i, j) in zip(self._products, self._places, strict=True)
        ]
        self._sums = [old * keep + share for old, share in zip(self._sums, shares, strict=True)]
        self._count += 1

    def anchor(self) -> None:
        """Never forget what was seen until now, however long nothing of its shape follows: it
        counts as ``_ANCHOR`` observations."""
        weight = _ANCHOR / max(1, self._count)
        products, sums = [x * weight for x in self._products], [x * weight for x in self._sums]
        self._anchor = products, sums
        self._products, self._sums = [0.0] * len(products), [0.0] * len(sums)

    def solve(self) -> tuple[float, ...]:
        """Return the coefficients; 0 of features that were never above 0."""
        products, sums = self._products, self._sums
        if self._anchor is not None:
            products = [a + b for a, b in zip(products, self._anchor[0], strict=True)]
            sums = [a + b for a, b in zip(sums, self._anchor[1], strict=True)]
        normal = dict(zip(self._places, products, strict=True))
        active = [i for i in range(self._num) if normal[i, i] > 0]
        while active:
            scale = [sqrt(normal[i, i]) for i in active]
            matrix = [
                [normal[min(i, j), max(i, j)] / (p * q) for j, q in zip(active, scale, strict=True)]
                for i, p in zip(active, scale, strict=True)
            ]
            for place, i in enumerate(active):
                matrix[place][place] += self._ridges[i]
            found = _solved(matrix, [sums[i] / p for i, p in zip(active, scale, strict=True)])
            worst = min(range(len(found)), key=found.__getitem__)
            if found[worst] >= 0:
                of = {i: x / p for i, x, p in zip(active, found, scale, strict=True)}
                return tuple(of.get(i, 0.0) for i in range(self._num))
            # What would count below 0 is left out, and the others are fitted anew without it.
            del active[worst]
        return (0.0,) * self._num


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve ``matrix x = right`` by elimination. With its ridge it is positive definite, so no
    pivot is looked for."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (right[i] - rest) / matrix[i][i]
    return found
