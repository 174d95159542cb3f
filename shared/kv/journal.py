"""What a worker tells gateways of its prefixes: changes since it told last, and a proof.

Not every block is told, but *granules*: prefixes that end at a multiple of what a gateway asks for,
where all workers' blocks end, too. A granule is there as long as its last block is: those before it
are never evicted sooner, but where a sequence computed again what another had cached.

For each tier there are a count and a digest of all granules (the exclusive or of their keys, which
are hashes already, so order does not matter). Who applied all changes has the same two numbers;
who has not, asks for a snapshot. Pure: nothing here waits, and no gateway can hold the scheduler up
by being slow: changes without an end become a snapshot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import IntEnum
from math import lcm
from typing import NamedTuple

from shared.errors import LocalProtocolError
from shared.kv.events import BlockStored, KvEvent
from shared.kv.prefix_hash import UNIT

KEY_BYTES = 8
"""Of a prefix's hash: enough for a hint. Whoever gives blocks out compares the whole hash."""

MAX_CHANGES = 1 << 16
"""Changes between two reports; of more a snapshot is made."""

CHUNK_KEYS = 1 << 13
"""Keys of a snapshot in one report: 64 KiB, so that no heartbeat waits behind a large one."""


class Tier(IntEnum):
    """Where KV lies, the fastest first."""

    HBM = 0
    DRAM = 1
    SSD = 2


_TIERS = tuple(Tier)  # an enum is walked through in Python

_ALL_TIERS = (1 << len(_TIERS)) - 1
"""A bit for each tier."""


def key_of(prefix_hash: bytes) -> int:
    """Return the name of a granule; never 0."""
    return int.from_bytes(prefix_hash[:KEY_BYTES], "little") or 1


def stride_of(granule_tokens: int, block_size: int) -> int:
    """Return how many tokens lie between two ends that a worker with such blocks tells of.

    Raises LocalProtocolError: the granule is no multiple of ``UNIT``.
    """
    if granule_tokens < UNIT or granule_tokens % UNIT:
        raise LocalProtocolError(f"a granule must be a multiple of {UNIT} tokens")
    return lcm(granule_tokens, block_size)


class TierChanges(NamedTuple):
    """Of one tier: keys that came and went; how many are there after them, and their digest."""

    stored: Sequence[int]
    removed: Sequence[int]
    num_keys: int
    digest: int


class KvChanges(NamedTuple):
    """One report to one gateway; in each tier ``stored`` is applied before ``removed``.

    is_snapshot: it begins one; whatever was told before counts no more. is_whole: with this report
    all is told; only then do counts and digests tell anything.
    """

    is_snapshot: bool
    is_whole: bool
    tiers: tuple[TierChanges, ...]


class _Digest:
    """Count and digest of every tier, of the granules of one stride."""

    def __init__(self) -> None:
        self.counts = [0] * len(Tier)
        self.digests = [0] * len(Tier)

    def flip(self, key: int, tiers: int, times: int) -> None:
        for tier in _TIERS:
            if tiers >> tier & 1:
                self.counts[tier] += times
                self.digests[tier] ^= key


class _Reader:
    """What one gateway has been told. told: of each key that has changed since, its tiers as they
    were told; None = it will get a snapshot."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.told: dict[int, int] | None = None
        self.snapshot: list[tuple[int, int]] = []


class Journal:
    """The granules of one worker's pool; a ``KvListener`` of it, of every ``UNIT`` tokens.

    Its entries, by key: a bit for each tier that has the granule, the prefix's tokens above them.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[int, int] = {}
        self._readers: dict[Hashable, _Reader] = {}
        self._digests: dict[int, _Digest] = {}

    def __call__(self, event: KvEvent) -> None:
        """Take what the pool tells."""
        if isinstance(event, BlockStored):
            self.stored(key_of(event.key), event.end, Tier.HBM)
        else:
            self.removed(key_of(event.key), Tier.HBM)

    def stored(self, key: int, end: int, tier: Tier) -> None:
        """A granule that ends after so many tokens is in this tier from now on."""
        entry = self._entries.get(key, 0)
        if not entry >> tier & 1:
            self._entries[key] = end << len(_TIERS) | entry & _ALL_TIERS | 1 << tier
            self._changed(key, end, entry & _ALL_TIERS, 1 << tier, 1)

    def removed(self, key: int, tier: Tier) -> None:
        """It is there no more. A key that no granule has is some other block's."""
        entry = self._entries.get(key, 0)
        if not entry >> tier & 1:
            return
        after = entry & ~(1 << tier)
        if after & _ALL_TIERS:
            self._entries[key] = after
        else:
            del self._entries[key]
        self._changed(key, entry >> len(_TIERS), entry & _ALL_TIERS, 1 << tier, -1)

    def _changed(self, key: int, end: int, before: int, flipped: int, times: int) -> None:
        for stride, digest in self._digests.items():
            if end % stride == 0:
                digest.flip(key, flipped, times)
        for reader in self._readers.values():
            if reader.told is not None and end % reader.stride == 0:
                reader.told.setdefault(key, before)
                if len(reader.told) > MAX_CHANGES:
                    reader.told = None

    # --- who reads it ----------------------------------------------------------------------------

    def subscribe(self, gateway: Hashable, granule_tokens: int) -> None:
        """Tell a gateway of granules of this size, from a snapshot on; again if it lost count.

        Raises LocalProtocolError: see ``stride_of``.
        """
        stride = stride_of(granule_tokens, self._block_size)
        self._readers[gateway] = _Reader(stride)
        if stride not in self._digests:
            digest = self._digests[stride] = _Digest()
            for key, tiers in self._granules(stride):
                digest.flip(key, tiers, 1)
        self._forget_strides()

    def unsubscribe(self, gateway: Hashable) -> None:
        """It has left, or never was here."""
        self._readers.pop(gateway, None)
        self._forget_strides()

    def _forget_strides(self) -> None:
        read = {reader.stride for reader in self._readers.values()}
        for stride in self._digests.keys() - read:
            del self._digests[stride]

    def _granules(self, stride: int) -> list[tuple[int, int]]:
        return [
            (key, entry & _ALL_TIERS)
            for key, entry in self._entries.items()
            if (entry >> len(Tier)) % stride == 0
        ]

    def report(self, gateway: Hashable) -> KvChanges | None:
        """Return what this gateway is to be told now; None = it does not want to know.

        If it is not whole, ask again at once.
        """
        reader = self._readers.get(gateway)
        if reader is None:
            return None
        stored: list[list[int]] = [[] for _ in _TIERS]
        removed: list[list[int]] = [[] for _ in _TIERS]
        is_snapshot = reader.told is None
        if reader.told is None:
            reader.told, reader.snapshot = {}, self._granules(reader.stride)
        chunk = reader.snapshot[-CHUNK_KEYS:]
        del reader.snapshot[-CHUNK_KEYS:]
        for key, tiers in chunk:
            _tell(key, tiers, stored)
        # What changed since the snapshot was made comes behind its last piece.
        if not reader.snapshot:
            for key, before in reader.told.items():
                after = self._entries.get(key, 0) & _ALL_TIERS
                _tell(key, after & ~before, stored)
                _tell(key, before & ~after, removed)
            reader.told = {}
        digest = self._digests[reader.stride]
        tiers = map(TierChanges, stored, removed, digest.counts, digest.digests)
        return KvChanges(is_snapshot, not reader.snapshot, tuple(tiers))


def _tell(key: int, tiers: int, into: list[list[int]]) -> None:
    for tier in _TIERS if tiers else ():
        if tiers >> tier & 1:
            into[tier].append(key)
