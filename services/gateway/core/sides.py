"""The two sides of the mesh as routing sees them: who computes prompts, who continues them, and who
is paired with whom.

A side is a list, not a product: a decision looks at each worker once. Who is paired is one integer
a prefill worker, with the bit of every decode worker that it reaches; the peer table keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.core.worker import Worker
from shared.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a policy may know of a request. avoid: workers that failed an earlier attempt."""

    num_tokens: int
    max_new_tokens: int
    avoid: frozenset[Incarnation] = frozenset()


Places = tuple[int, int]
"""A prefill and a decode worker, by their places in the two lists of ``Sides``."""


class Scores(NamedTuple):
    """What a policy compares: one number for each place of a side; lower is better."""

    prefills: Sequence[float]
    decodes: Sequence[float]


@dataclass(slots=True)
class Sides:
    """Prefill and decode workers that may be chosen, in joining order: each has a partner here.

    partners: of each prefill worker, the bits of the decode workers here that it may push to. A
    colocated worker stands on both sides and is its own partner. at_home: of these, who need not be
    borrowed: each on the side of its home; None = all.
    """

    prefills: Sequence[Worker]
    partners: Sequence[int]
    decodes: Sequence[Worker]
    at_home: Sides | None = None
    _decode_bits: int = field(init=False)
    _least_prefill_tokens: int = field(init=False)
    _least_decode_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._decode_bits = sum(worker.bit for worker in self.decodes)
        self._least_prefill_tokens = min((w.capacity_tokens for w in self.prefills), default=0)
        self._least_decode_tokens = min((w.capacity_tokens for w in self.decodes), default=0)

    def __bool__(self) -> bool:
        return bool(self.prefills)

    @property
    def num_pairs(self) -> int:
        """Pairs that take new work."""
        return sum(mask.bit_count() for mask in self.partners)

    def places_of(self, bits: int) -> Sequence[int]:
        """Return the places of the decode workers with these bits, in order."""
        if bits == self._decode_bits:
            return range(len(self.decodes))
        return [place for place, worker in enumerate(self.decodes) if worker.bit & bits]

    def partners_of(self, prefill: int) -> Sequence[int]:
        """Return the places of the decode workers that a prefill worker (its place) reaches."""
        return self.places_of(self.partners[prefill])

    def fitting(self, num_tokens: int) -> Sides:
        """Leave out who could not hold a prompt of this length (on decode: and its next token)."""
        if num_tokens <= self._least_prefill_tokens and num_tokens < self._least_decode_tokens:
            return self
        return sides_of(
            [
                (worker, mask)
                for worker, mask in zip(self.prefills, self.partners, strict=True)
                if num_tokens <= worker.capacity_tokens
            ],
            [worker for worker in self.decodes if num_tokens < worker.capacity_tokens],
        )

    def without(self, avoid: Collection[Incarnation], *, most: int) -> Sides:
        """Leave out every pair with more than ``most`` (0 or 1) workers to avoid; a colocated
        worker is two."""
        bad = sum(worker.bit for worker in self.decodes if worker.incarnation in avoid)
        prefills = [
            (worker, mask if most > (worker.incarnation in avoid) else mask & ~bad)
            for worker, mask in zip(self.prefills, self.partners, strict=True)
            if most or worker.incarnation not in avoid
        ]
        return sides_of(prefills, self.decodes)


def sides_of(prefills: Sequence[tuple[Worker, int]], decodes: Sequence[Worker]) -> Sides:
    """Return the sides of these workers, without those that have no partner among them.

    prefills: with the bits of their partners, wherever those are.
    """
    there = sum(worker.bit for worker in decodes)
    kept = [(worker, mask & there) for worker, mask in prefills if mask & there]
    reached = 0
    for _, mask in kept:
        reached |= mask
    return Sides(
        [worker for worker, _ in kept],
        [mask for _, mask in kept],
        [worker for worker in decodes if worker.bit & reached],
    )
