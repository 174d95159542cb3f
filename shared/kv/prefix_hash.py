"""Names of token prefixes: equal hash means equal tokens from position 0, equal model, layout and
tenant.

SHA-256 over (parent, tokens) per full block, so a client cannot forge a collision and read
another's KV; the root binds model fingerprint, layout digest and the tenant's salt. Knows no blocks
and no cache.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

_U32 = next(code for code in "IL" if array(code).itemsize == 4)


def root_hash(model_key: bytes, salt: bytes) -> bytes:
    """Return the parent of block 0.

    model_key: fingerprint and layout digest, whatever must be equal before KV may be shared. salt:
    the tenant's.
    """
    head = struct.pack("<II", len(model_key), len(salt))
    return hashlib.sha256(b"pdmesh/prefix/1" + head + model_key + salt).digest()


class PrefixChain:
    """The hashes of one token list's full blocks, computed once and extended as the list grows.

    The list that is passed in may only ever grow at its end between calls.
    """

    __slots__ = ("_block_size", "_hashes", "_root")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def hashes(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return the hashes of the first ``num_blocks`` blocks of ``tokens``, all of which must be
        full."""
        known, size = self._hashes, self._block_size
        parent = known[-1] if known else self._root
        for idx in range(len(known), num_blocks):
            column = array(_U32, tokens[idx * size : (idx + 1) * size])
            if sys.byteorder == "big":
                column.byteswap()
            parent = hashlib.sha256(parent + column.tobytes()).digest()
            known.append(parent)
        return known[:num_blocks]
