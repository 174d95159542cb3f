"""Tiers below the pools of simulated workers: their flags, and what is said of what they held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cyclopts import Parameter

from services.cli.quantities import LinkRate, Size
from services.cli.words import speed
from services.planner.mesh_run import CachedTokens
from services.sim.orders import TierSize
from shared.kv.journal import Tier
from shared.kv.tiers import CachePolicy


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TierFlags:
    """Cache tiers below the pool of each worker that computes prompts, as a worker's own flags.

    Parameters
    ----------
    dram_cache
        Host memory below the KV pool, as 4GB: a worker's --dram-cache; 0 = none.
    ssd_cache
        Room on disk below that, as 40GB: a worker's --ssd-cache-size, for here nothing is written
        and no folder is named; 0 = none.
    cache_policy
        What gives way there: a worker's --cache-policy.
    dram_bandwidth
        Copies between the pool and memory, either way, one after the other. The default is an
        assumption: measure yours.
    ssd_bandwidth
        Likewise of the disk.
    """

    dram_cache: Size = 0
    ssd_cache: Size = 0
    cache_policy: CachePolicy = CachePolicy.LRU
    dram_bandwidth: LinkRate = 10e9
    ssd_bandwidth: LinkRate = 2e9

    @property
    def sizes(self) -> tuple[TierSize, ...]:
        """Which tiers there are, the fastest first."""
        both = (
            TierSize(Tier.DRAM, self.dram_cache, self.dram_bandwidth),
            TierSize(Tier.SSD, self.ssd_cache, self.ssd_bandwidth),
        )
        return tuple(it for it in both if it.num_bytes)

    @property
    def about(self) -> list[str]:
        """Return in a sentence how quick they are, and that this is assumed."""
        words = [f"{_PLACES[it.kind]} {speed(it.bytes_s / 1e9)}" for it in self.sizes]
        if not words:
            return []
        return [f"tiers: {' and '.join(words)}, as given or assumed; copies go one by one"]


_PLACES: Final = {Tier.DRAM: "memory", Tier.SSD: "disk"}


def cached_line(cached: CachedTokens) -> list[str]:
    """Return in a sentence where what was not computed of the prompts lay; nothing, if all was."""
    if not cached.num_cached:
        return []
    parts = (
        (cached.pool, "lay in pools"),
        (cached.dram, "came from memory"),
        (cached.ssd, "came from disk"),
        (cached.fetched, "came from other workers"),
    )
    said = [f"{num / cached.prompts:.1%} {word}" for num, word in parts if num]
    share = cached.num_cached / cached.prompts
    return [f"cached: {share:.1%} of the prompts' tokens; {', '.join(said)}"]
