"""Mooncake's closed forms, theirs beside ours."""

from __future__ import annotations

from typing import Final

from services.planner.core.fetch import fetch_pays_from, pipeline_makespan
from services.planner.core.kv_size import PUBLISHED
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.core.roofline import DEVICES

FAST25_CAPACITIES: Final = (1_000, 10_000, 50_000, 100_000, None)
FAST25_HIT_RATES: Final = {
    "conversation": {
        "lru": (0.0445, 0.2112, 0.3546, 0.3637, 0.3664),
        "lfu": (0.0481, 0.1318, 0.3438, 0.3631, 0.3664),
    },
    "synthetic": {
        "lru": (0.0825, 0.4235, 0.6396, 0.6396, 0.6396),
        "lfu": (0.0401, 0.3578, 0.6396, 0.6396, 0.6396),
    },
}
"""Of an independent replay by the same rules; the paper prints no such table of these traces."""

REPLAY_NOTE: Final = (
    "The paper's 'cache ratio' is 40 % and 66 %: counted in tokens, rounded up (37.4 and 65.1 by "
    "tokens, 36.6 and 64.0 by blocks). The arXiv edition's table 1 is of another trace, which is "
    "not public as a whole; there LRU leads at every size, here LFU leads at 1,000 blocks of the "
    "conversation. 'length-aware' evicts, of equally used blocks, the one latest in its request: "
    "the paper does not say which end goes."
)


def mooncake_tables() -> list[PaperTable]:
    """Fetch or recompute (FAST'25, section 2), and pipelines of chunks."""
    shape = PUBLISHED["llama-3-70b"]
    fetches = [
        PaperRow(
            f"fetching 8192 tokens pays from, 8 x {name.upper()}",
            f"{theirs} GB/s",
            fetch_pays_from(shape, 8192, 8 * DEVICES[name].flops) / 1e9,
            2,
            "GB/s",
            "rounded there",
        )
        for name, theirs in (("a800", 6), ("h800", 19))
    ]
    sizes = [
        PaperRow("LLaMA3-70B, KV of a token", "320 KiB", shape.token_bytes / 1024, 0, "KiB"),
        PaperRow("tokens that 1 TB of memory holds", "3 M", 1e12 / shape.token_bytes / 1e6, 2, "M"),
    ]
    chunks = [1.0, 1.2, 1.4, 1.6]
    pipelines = [
        PaperRow(
            f"{len(chunks)} chunks of 1.0 to 1.6 s on {num} nodes", "",
            pipeline_makespan(chunks, num), 3, "s",
        )
        for num in (1, 2, 4)
    ]  # fmt: skip
    return [
        PaperTable("Mooncake (FAST'25): fetch a prefix or compute it, LLaMA3-70B", fetches),
        PaperTable("Mooncake: sizes", sizes),
        PaperTable(
            "Mooncake: chunked pipeline parallelism, makespan of one prompt",
            pipelines,
        ),
    ]
