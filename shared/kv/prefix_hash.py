"""Names of token prefixes: equal hash means equal tokens from position 0, equal model, layout and
tenant.

A prefix's name is SHA-256 over the root and all its tokens as little-endian u32, so it depends on
its tokens alone: blocks of 16 and of 256 tokens that end at the same position have the same name
there. One running hash passes over the prompt once, and is asked wherever a name is wanted:

    root | tokens [0, 128) | tokens [128, 256) | ...
                          H(128)              H(256)

A client cannot forge a collision and read another's KV; the root binds model fingerprint, layout
digest and the tenant's salt. Knows no blocks and no cache.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any

UNIT = 128
"""Prefixes whose length is a multiple of it are told to gateways. At 64 a long prompt takes twice
as long to look up, and at 256 a short one loses much of what another has computed."""


def root_hash(model_key: bytes, salt: bytes) -> bytes:
    """Return what every name of a model and a tenant begins with.

    model_key: fingerprint and layout digest, whatever must be equal before KV may be shared. salt:
    the tenant's.
    """
    head = struct.pack("<II", len(model_key), len(salt))
    return hashlib.sha256(b"pdmesh/prefix/2" + head + model_key + salt).digest()


def column_of(tokens: Sequence[int]) -> bytes:
    """Return token ids as they are hashed: little-endian u32."""
    return array("I", tokens).tobytes()


def prefix_hashes(root: bytes, column: bytes, every: int = UNIT) -> list[bytes]:
    """Return the hashes of a prompt's prefixes of ``every``, twice, three times... as many tokens,
    as ``PrefixChain`` has them.

    column: the prompt's tokens, packed as little-endian u32.
    """
    return _further(hashlib.sha256(root), column, 4 * every)


def _further(running: Any, column: bytes, num_bytes: int) -> list[bytes]:
    """Pass over whole pieces of so many bytes, and return the hash after each."""
    update, digest, hashes = running.update, running.digest, list[bytes]()
    for at in range(0, len(column) // num_bytes * num_bytes, num_bytes):
        update(column[at : at + num_bytes])
        hashes.append(digest())
    return hashes


class PrefixChain:
    """The hashes of one token list's full blocks, computed once and extended as the list grows.

    The list that is passed in may only ever grow at its end between calls.
    """

    __slots__ = ("_block_size", "_hashes", "_running")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: list[bytes] = []
        self._running = hashlib.sha256(root)  # over the blocks that are known

    def hashes(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """Return the hashes of the first ``num_blocks`` blocks of ``tokens``, all of which must be
        full: of each the hash of the prefix that ends with it."""
        known, size = self._hashes, self._block_size
        if num_blocks > len(known):
            column = column_of(tokens[len(known) * size : num_blocks * size])
            known += _further(self._running, column, 4 * size)
        return known[:num_blocks]
