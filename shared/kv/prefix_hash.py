"""Names of token prefixes: equal hash means equal tokens from position 0, equal model, layout and
tenant.

One chain for everybody, whatever their block size: SHA-256 over (hash of the prefix up to the last
whole unit, tokens since), so the hash of a prefix depends on its tokens alone. Blocks of 16 and of
256 tokens that end at the same position have the same name there.

    |---- unit ----|---- unit ----|--- rest ---|
    root           H(128)         H(256)       H(p) = SHA-256(H(256), tokens [256, p))

A client cannot forge a collision and read another's KV; the root binds model fingerprint, layout
digest and the tenant's salt. Knows no blocks and no cache.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

_U32 = next(code for code in "IL" if array(code).itemsize == 4)

UNIT = 128
"""Tokens of a link of the chain. At 64 a long prompt takes twice as long to hash, and at 256 a
short one loses much of what another has computed."""

_UNIT_BYTES = 4 * UNIT


def root_hash(model_key: bytes, salt: bytes) -> bytes:
    """Return the parent of the first unit.

    model_key: fingerprint and layout digest, whatever must be equal before KV may be shared. salt:
    the tenant's.
    """
    head = struct.pack("<II", len(model_key), len(salt))
    return hashlib.sha256(b"pdmesh/prefix/1" + head + model_key + salt).digest()


def unit_hashes(root: bytes, column: bytes) -> list[bytes]:
    """Return the hashes of a prompt's prefixes of 128, 256, 384... tokens, as ``PrefixChain`` has
    them.

    column: the prompt's tokens, packed as little-endian u32.
    """
    sha256, parent = hashlib.sha256, root
    return [
        parent := sha256(parent + column[at : at + _UNIT_BYTES]).digest()
        for at in range(0, len(column) // _UNIT_BYTES * _UNIT_BYTES, _UNIT_BYTES)
    ]


class PrefixChain:
    """The hashes of one token list's full blocks, computed once and extended as the list grows.

    The list that is passed in may only ever grow at its end between calls.
    """

    __slots__ = ("_block_size", "_hashes", "_parent", "_unit_at")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: list[bytes] = []
        self._parent = root  # of the unit that begins at ``_unit_at``
        self._unit_at = 0

    def hashes(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return the hashes of the first ``num_blocks`` blocks of ``tokens``, all of which must be
        full: of each the hash of the prefix that ends with it."""
        known = self._hashes
        for idx in range(len(known), num_blocks):
            end = (idx + 1) * self._block_size
            while end - self._unit_at > UNIT:  # a unit ends within the block
                self._link(tokens, self._unit_at + UNIT)
            known.append(self._link(tokens, end))
        return known[:num_blocks]

    def _link(self, tokens: Sequence[int], end: int) -> bytes:
        column = array(_U32, tokens[self._unit_at : end])
        if sys.byteorder == "big":
            column.byteswap()
        digest = hashlib.sha256(self._parent + column.tobytes()).digest()
        if end - self._unit_at == UNIT:
            self._parent, self._unit_at = digest, end
        return digest
