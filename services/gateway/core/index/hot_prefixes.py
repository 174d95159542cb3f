"""Which beginnings most prompts have in common: for people who look; no decision goes by it.

Counts of prefixes that end at certain granules, halved every minute and whenever there are too
many; what was seen once then goes (lossy counting; Manku and Motwani, VLDB 2002). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

HALVED_S = 60.0
MOST_PREFIXES = 1 << 12

EVERY_GRANULE = 16
"""Of a prompt's granules each is counted up to this one, then those at each doubling of it."""

SAME_SHARE = 0.9
"""A prefix is not told where a longer one has this share of its prompts."""


class HotPrefix(NamedTuple):
    """key: of its granule, the beginning of a hash. share: of the last minutes' prompts that begin
    so."""

    key: int
    num_tokens: int
    share: float


@dataclass(slots=True)
class _Seen:
    """parent: the key of the next shorter prefix that is counted, 0 = there is none."""

    num_tokens: int
    parent: int
    prompts: float = 0.0


class HotPrefixes:
    """Of the prompts of one gateway."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._num_prompts = 0.0
        self._halved_at = 0.0

    def asked(self, keys: Sequence[int], granule_tokens: int, now: float) -> None:
        """Count one prompt. keys: of its granules in order, at least one."""
        if now - self._halved_at >= HALVED_S or len(self._seen) > MOST_PREFIXES:
            self._halve(now)
        self._num_prompts += 1
        parent, last = 0, len(keys)
        place = 1
        while place <= last:
            key = keys[place - 1]
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen(place * granule_tokens, parent)
            seen.prompts += 1
            parent = key
            place = place + 1 if place < EVERY_GRANULE else 2 * place

    def _halve(self, now: float) -> None:
        # As often as was due since, for nobody may have asked; 60 times leave nothing of any count.
        times = 1 << min(60, max(1, int((now - self._halved_at) / HALVED_S)))
        self._halved_at = now
        self._num_prompts /= times
        self._seen = {key: it for key, it in self._seen.items() if it.prompts > 1}
        for it in self._seen.values():
            it.prompts /= times

    def hottest(self, most: int) -> list[HotPrefix]:
        """Return those by which most tokens come again, the hottest first; none that one prompt
        alone has, and of a chain with the same prompts only its longest."""
        longer: dict[int, float] = {}
        for it in self._seen.values():
            longer[it.parent] = max(longer.get(it.parent, 0.0), it.prompts)
        told = [
            (it.prompts * it.num_tokens, HotPrefix(key, it.num_tokens, it.prompts))
            for key, it in self._seen.items()
            if it.prompts > 1 and longer.get(key, 0.0) < SAME_SHARE * it.prompts
        ]
        total = max(self._num_prompts, 1.0)
        return [it._replace(share=it.share / total) for _, it in sorted(told, reverse=True)[:most]]
