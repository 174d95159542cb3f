"""Replays against a cache that is a plain list, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.planner.core.cache_replay import POLICIES, BlockCache, Policy, replay


def by_hand(
    requests: Sequence[Sequence[int]], policy: Policy, capacity: int | None
) -> tuple[int, int]:
    """Hits and evictions, by scanning a dictionary of what is known of each block."""
    known: dict[int, tuple[int, int, int]] = {}  # uses, position, last use
    hits = evicted = clock = 0
    worst = {
        "lru": lambda block: known[block][2],
        "lfu": lambda block: (known[block][0], known[block][2]),
        "length-aware": lambda block: (known[block][0], -known[block][1], known[block][2]),
    }[policy]
    for blocks in requests:
        for block in blocks:
            if block not in known:
                break
            hits += 1
        for position, block in enumerate(blocks):
            clock += 1
            if block not in known and capacity is not None and len(known) == capacity:
                del known[min(known, key=worst)]
                evicted += 1
            known[block] = (known.get(block, (0, 0, 0))[0] + 1, position, clock)
    return hits, evicted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_replays_are_those_of_a_cache_done_by_hand(policy: Policy, seed: int) -> None:
    """Requests that share prefixes, as traces have them; any capacity."""
    rng = random.Random(seed)
    chains = [[0]]
    requests: list[list[int]] = []
    for idx in range(300):
        prefix = rng.choice(chains)[: rng.randint(0, 12)]
        blocks = [*prefix, *range(1000 * idx + 1, 1000 * idx + 1 + rng.randint(1, 6))]
        chains.append(blocks)
        requests.append(blocks)
    for capacity in (1, 3, 40, 200, None):
        found = replay(requests, BlockCache(capacity, policy))
        assert (found.num_hits, found.num_evicted) == by_hand(requests, policy, capacity)
        assert found.num_blocks == sum(map(len, requests))
        assert found.num_distinct == len({block for blocks in requests for block in blocks})


def test_a_request_hits_with_leading_blocks_alone() -> None:
    """What stands behind a missing block is of no use, though it is there."""
    found = replay([(1, 2, 3), (1, 9, 3)], BlockCache(None, "lru"))
    assert found.num_hits == 1
    assert found.hit_rate == 1 / 6


def test_uses_count_anew_after_an_eviction_and_the_newcomer_stays() -> None:
    """1 is used three times, goes when it is alone, and comes back as new as the next one."""
    cache = BlockCache(1, "lfu")
    found = replay([(1,), (1,), (1,), (2,), (1,), (2,)], cache)
    assert (found.num_hits, found.num_evicted) == (2, 3)
    assert 2 in cache


def test_length_aware_takes_the_latest_position_of_equals() -> None:
    """Which end goes, the paper does not say."""
    cache = BlockCache(3, "length-aware")
    replay([(1, 2, 3), (4,)], cache)
    assert 3 not in cache
    assert 4 in cache
