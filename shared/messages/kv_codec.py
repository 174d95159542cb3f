"""What workers tell of their prefixes, between the journal's records and the wire."""

from __future__ import annotations

from shared import wire
from shared.errors import RemoteProtocolError
from shared.kv.journal import KvChanges, Tier, TierChanges
from shared.messages.columns import pack_u64, unpack_u64

_NOTHING = TierChanges((), (), 0, 0)


def kv_to_wire(changes: KvChanges) -> wire.KvChanges:
    """Pack a report; trailing tiers of which there is nothing to say are left out."""
    tiers = list(changes.tiers)
    while tiers and not any(tiers[-1]):
        tiers.pop()
    return wire.KvChanges(
        is_snapshot=changes.is_snapshot,
        is_whole=changes.is_whole,
        tiers=[
            wire.KvTier(
                stored=pack_u64(it.stored),
                removed=pack_u64(it.removed),
                num_keys=it.num_keys,
                digest=it.digest,
            )
            for it in tiers
        ],
    )


def kv_from_wire(changes: wire.KvChanges) -> KvChanges:
    """Unpack a report. Raises RemoteProtocolError: more tiers than there are, half a key."""
    if len(changes.tiers) > len(Tier):
        raise RemoteProtocolError(f"there are {len(Tier)} tiers at most", param="kv")
    tiers = [
        TierChanges(
            unpack_u64(it.stored, name="stored"),
            unpack_u64(it.removed, name="removed"),
            it.num_keys,
            it.digest,
        )
        for it in changes.tiers
    ]
    tiers += [_NOTHING] * (len(Tier) - len(tiers))
    return KvChanges(changes.is_snapshot, changes.is_whole, tuple(tiers))
