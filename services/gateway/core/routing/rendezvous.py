"""The same beginning to the same worker, as long as that is not too busy: rendezvous hashing with
bounded loads.

Needs no index, and gateways agree without a word: each worker's weight is a hash of the key and its
incarnation, the heaviest is taken (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998), and one that has more than 1.25 times its share is passed over (Mirrokni,
Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter

from services.gateway.core.routing.sides import Places, RouteRequest, RoutingPolicy, Scores, Sides
from services.gateway.core.worker import Worker

KEY_TOKENS = 256
"""The key is the prompt's first tokens, so many: prompts that begin alike share it."""

BOUND = 1.25
"""Most load of a worker that is given more, in shares of the mean."""

_MASK = (1 << 64) - 1


def affinity_of(column: bytes, salt: bytes) -> int:
    """Return the key of a prompt, whose tokens are a little-endian u32 column; other tenants' salts
    have other keys, as in the prefix cache."""
    # BLAKE2b takes a key of at most 64 bytes.
    digest = blake2b(column[: 4 * KEY_TOKENS], digest_size=8, key=salt[:64]).digest()
    return int.from_bytes(digest, "little")


class BoundedHash(RoutingPolicy):
    """See the module. Loads are prompt tokens for prefill and reserved tokens for decode."""

    name = "hash"
    needs_affinity = True
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_tokens"))

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the heaviest prefill worker within the bound, and of its partners likewise."""
        key, size = request.affinity, request.num_tokens
        everybody = range(len(sides.prefills))
        prefill = _heaviest(key, size, sides.prefills, scores.prefills, everybody)
        partners = sides.partners_of(prefill)
        size += request.max_new_tokens
        return prefill, _heaviest(key, size, sides.decodes, scores.decodes, partners)


def _heaviest(
    key: int,
    size: int,
    workers: Sequence[Worker],
    loads: Sequence[float],
    places: Sequence[int],
) -> int:
    """Return the place with the largest weight whose load is within the bound, this request counted
    in the mean. There is one: the least loaded is not above the mean."""
    bound = BOUND * (sum([loads[place] for place in places]) + size) / len(places)
    weights = [
        (_weight(key, workers[place].incarnation), place)
        for place in places
        if loads[place] <= bound
    ]
    return max(weights)[1]


def _weight(key: int, incarnation: int) -> int:
    mixed = ((key ^ incarnation) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 32)
