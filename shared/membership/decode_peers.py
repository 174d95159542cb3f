"""Which decode workers a worker may push to: what all its gateways name, merged. Pure.

One that no gateway names any more counts for a while yet: a gateway that restarts says nothing
about whether its workers live, and a pair that is closed must be made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shared.address import Address
from shared.ids import Incarnation

FORGET_S = 10.0
"""How long a decode worker counts that no gateway names any more."""


@dataclass(frozen=True, slots=True)
class DecodePeer:
    """A decode worker that a gateway named. Another incarnation on the same address is another
    worker.
    """

    incarnation: Incarnation
    address: Address


class TellPeers(NamedTuple):
    """The merged list has changed; in the order in which they were first named."""

    peers: tuple[DecodePeer, ...]


Effect = TellPeers


class DecodePeers:
    """The merge. A gateway is told apart by the address that it is reached at."""

    def __init__(self) -> None:
        self._named: dict[Address, tuple[DecodePeer, ...]] = {}
        self._known: dict[Incarnation, DecodePeer] = {}
        self._forget_at: dict[Incarnation, float] = {}  # those that nobody names

    def named(self, gateway: Address, peers: Iterable[DecodePeer], now: float) -> list[Effect]:
        """A gateway says which decode workers there are: these alone."""
        self._named[gateway] = tuple(peers)
        return self._merge(now)

    def gateway_lost(self, gateway: Address, now: float) -> list[Effect]:
        """It names nobody any more. Idempotent."""
        self._named.pop(gateway, None)
        return self._merge(now)

    def tick(self, now: float) -> list[Effect]:
        """Forget who is due. Call at ``next_tick_at``."""
        return self._merge(now)

    @property
    def next_tick_at(self) -> float | None:
        """When the next one is forgotten; None = nobody."""
        return min(self._forget_at.values(), default=None)

    def _merge(self, now: float) -> list[Effect]:
        before = tuple(self._known.values())
        named = {peer.incarnation: peer for peers in self._named.values() for peer in peers}
        for incarnation, peer in named.items():
            self._known.setdefault(incarnation, peer)
            self._forget_at.pop(incarnation, None)
        for incarnation in self._known.keys() - named.keys():
            if self._forget_at.setdefault(incarnation, now + FORGET_S) <= now:
                del self._known[incarnation], self._forget_at[incarnation]
        peers = tuple(self._known.values())
        return [TellPeers(peers)] if peers != before else []
