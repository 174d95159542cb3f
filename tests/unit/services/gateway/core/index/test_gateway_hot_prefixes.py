"""Which beginnings many prompts have in common."""

from __future__ import annotations

import random

from services.gateway.core.index.hot_prefixes import MOST_PREFIXES, HotPrefix, HotPrefixes

SYSTEM = [11, 12, 13]


def test_the_longest_of_a_chain_is_told_and_what_goes_on_for_some() -> None:
    """All begin alike, a quarter of them go on alike; what one prompt alone has is not told."""
    hot = HotPrefixes()
    for number in range(40):
        tenant = [21, 22] if number % 4 == 0 else []
        hot.asked([*SYSTEM, *tenant, 1000 + number], 256, now=1.0)
    assert hot.hottest(5) == [HotPrefix(13, 3 * 256, 1.0), HotPrefix(22, 5 * 256, 0.25)]
    assert hot.hottest(1) == [HotPrefix(13, 3 * 256, 1.0)]


def test_long_prompts_are_counted_at_doublings() -> None:
    """A common beginning of 100 granules is known as one of 64."""
    hot = HotPrefixes()
    for number in range(3):
        hot.asked([*range(1, 101), 1000 + number], 128, now=0.0)
    assert hot.hottest(9) == [HotPrefix(64, 64 * 128, 1.0)]


def test_what_nobody_asks_any_more_goes() -> None:
    """Half of it each minute, and no less if nobody asked anything meanwhile."""
    hot = HotPrefixes()
    for _ in range(8):
        hot.asked([1], 128, now=0.0)
    hot.asked([2], 128, now=60.0)
    hot.asked([2], 128, now=61.0)
    assert {it.key: round(it.share, 3) for it in hot.hottest(9)} == {1: 0.667, 2: 0.333}
    hot.asked([2], 128, now=3600.0)
    assert hot.hottest(9) == []
    hot.asked([2], 128, now=3601.0)
    assert hot.hottest(9) == [HotPrefix(2, 128, 1.0)]


def test_memory_is_bounded_and_a_hot_one_is_never_lost() -> None:
    """Endless new prompts, and every tenth one with a beginning that came before."""
    hot, source = HotPrefixes(), random.Random(1)
    for number in range(3 * MOST_PREFIXES):
        first = [7] if number % 10 == 0 else [source.getrandbits(63)]
        hot.asked([*first, source.getrandbits(63)], 128, now=0.0)
        assert len(hot._seen) <= MOST_PREFIXES + 2
    [hottest] = hot.hottest(9)
    assert hottest.key == 7
    assert 0.07 < hottest.share < 0.13
