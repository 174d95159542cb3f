"""Identities of the mesh. Ids carry no meaning: they are random, compared, and never parsed.

Random sources are arguments, so that a simulation with one seed replays bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

from shared.address import Address

ID_BYTES = 16
"""Length of a request id, a transfer id and a lease token."""

RequestId = NewType("RequestId", bytes)
"""16 random bytes, made by the gateway for every request."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes, made by the sink for every grant."""

LeaseToken = NewType("LeaseToken", bytes)
"""16 random bytes, made by the gateway for every attempt and told to its two workers alone: unlike
a request id it stands in no log, header or trace. Who cannot name it neither opens nor grants."""

Incarnation = NewType("Incarnation", int)
"""Random 64 bits per process start, never 0: a peer that restarts on the same address is a new
peer."""


@dataclass(frozen=True, slots=True)
class MeshPeer:
    """A worker as gateways name it to others. Another incarnation on the same address is another
    worker."""

    incarnation: Incarnation
    address: Address


StreamId = NewType("StreamId", int)
"""Names one (request, attempt) within one gateway-worker session; made by the gateway, never
reused."""

NO_ORDER = StreamId(0)
"""Nobody's."""

RandomBytes = Callable[[int], bytes]
"""``os.urandom`` in production, ``random.Random(seed).randbytes`` under simulation."""


def new_incarnation(random_bytes: RandomBytes) -> Incarnation:
    """Return a fresh incarnation; 0 is kept for "nobody"."""
    return Incarnation(int.from_bytes(random_bytes(8), "little") or 1)
