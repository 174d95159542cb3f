"""Counter-based random numbers: the number of token i is a pure function of (seed, i).

Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"), with
key = seed and counter = (i, 0). No state, so neither batch, row order, device nor a move to another
worker can change it. Test vectors: Random123's kat_vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Encrypt counters ``[n, 4]`` under keys ``[n, 2]``, 32-bit words held in uint64."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Return one float64 in [0, 1) with 53 random bits for each (seed, index).

    seeds: 64 bits each (taken modulo 2**64). indices: >= 0.
    """
    seed = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    zero = np.zeros_like(index)
    counters = np.stack((index & _LOW, index >> _HALF, zero, zero), axis=1)
    words = philox4x32(counters, np.stack((seed & _LOW, seed >> _HALF), axis=1))
    bits = (words[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
