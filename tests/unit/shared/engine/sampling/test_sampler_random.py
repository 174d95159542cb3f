"""The random numbers behind sampling: published vectors, purity, uniformity."""

from __future__ import annotations

import numpy as np
import pytest

from shared.engine.sampling.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random123_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]
) -> None:
    """Philox4x32-10 gives the words of Random123's kat_vectors."""
    words = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(int(word) for word in words[0]) == want


def test_our_vectors() -> None:
    """(seed, index) -> number never changes between versions: answers could not be repeated."""
    assert uniforms([0, 1, 2**64 - 1], [0, 5, 2**33]).tolist() == [
        0.39904647231489565,
        0.16027821820659482,
        0.38429934080917416,
    ]


def test_pure() -> None:
    """A number depends on its own seed and index only, not on its neighbours or their order."""
    seeds, indices = [3, 3, 9, 2**63], [0, 1, 0, 77]
    together = uniforms(seeds, indices).tolist()
    alone = [uniforms([seed], [index]).item() for seed, index in zip(seeds, indices, strict=True)]
    assert together == alone
    assert uniforms(seeds[::-1], indices[::-1]).tolist() == together[::-1]
    assert len(set(together)) == 4


@pytest.mark.parametrize("along", ["indices", "seeds"])
def test_uniform(along: str) -> None:
    """Over many indices of one seed, and over many seeds at one index, numbers are uniform."""
    count, bins = 20_000, 50
    fixed = [7] * count
    numbers = uniforms(fixed, range(count)) if along == "indices" else uniforms(range(count), fixed)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.histogram(numbers, bins=bins, range=(0, 1))[0]
    chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
    assert chi_square < 95  # 49 degrees of freedom: exceeded by chance once in 10,000
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 0.03
