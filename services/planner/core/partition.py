"""How to cut a model over a torus of chips: Pope et al., "Efficiently scaling transformer
inference" (MLSys'23, arXiv 2211.05102).

Tokens are BL (batch x length), the model's width E, that of its feed-forward layer F, n chips.
Communication is in elements a chip and feed-forward layer; multiply by bytes.
"""

from __future__ import annotations

import math
from typing import Final

from services.planner.core.paper_table import PaperRow, PaperTable

TPU_V4_FLOPS: Final = 275e12
TPU_V4_HBM: Final = 32 * 1024**3
KV_SHARE: Final = 0.3

PALM_LAYERS: Final = 118
PALM_WIDTH: Final = 18432
PALM_FEED_FORWARD: Final = 73728
PALM_WEIGHTS: Final = 540e9


def stationary_1d(tokens: float, width: int) -> float:
    """Weights stay, cut along F: constant in n."""
    return 2 * tokens * width


def stationary_2d(tokens: float, width: int, feed_forward: int, n: int, x: float) -> float:
    """Weights stay, cut x ways along E and n/x along F."""
    return 2 * tokens * (width / x + feed_forward / (n / x))


def best_x(width: int, feed_forward: int, n: int) -> float:
    """Return the cut along E with the least traffic; sqrt(n)/2 for F = 4E."""
    return math.sqrt(n * width / feed_forward)


def gathered(tokens: float, width: int, feed_forward: int, n: int, over: float) -> float:
    """Weights are gathered over ``over`` of the n chips; over n there is no activation traffic."""
    weights = 2 * width * feed_forward * over / n
    return weights if over == n else weights + 2 * tokens * width / over


def best_gather(tokens: float, feed_forward: int, n: int) -> float:
    """Return over how many chips gathering moves least.

    From BL = nF/4 on these are all: sqrt(BL n / F) chips, fewer than n up to BL = nF, move as much.
    """
    if 4 * tokens >= n * feed_forward:
        return n
    return max(1.0, math.sqrt(tokens * n / feed_forward))


def layout(tokens: float, width: int, feed_forward: int, n: int) -> str:
    """Return the layout with the least traffic: '1d', '2d' or 'gathered'."""
    x = max(1.0, min(n, best_x(width, feed_forward, n)))
    traffic = {
        "1d": stationary_1d(tokens, width),
        "2d": stationary_2d(tokens, width, feed_forward, n, x),
        "gathered": gathered(tokens, width, feed_forward, n, best_gather(tokens, feed_forward, n)),
    }
    return min(traffic, key=lambda name: traffic[name])


def longest_context(kv_heads: int, head_dim: int, ways: int, batch: int) -> float:
    """Return the longest context of PaLM 540B, tokens, that 30 % of every chip's memory holds.

    kv_heads of head_dim are kept in all; a token's KV is spread over so many chips (ways).
    """
    token_bytes = 2 * PALM_LAYERS * kv_heads * head_dim * 2
    return KV_SHARE * TPU_V4_HBM / (token_bytes / ways * batch)


def flops_utilization(tokens: float, seconds: float) -> float:
    """Return the share of 64 chips' peak that PaLM's matrix products use."""
    return 2 * PALM_WEIGHTS * tokens / (seconds * 64 * TPU_V4_FLOPS)


def pope_tables() -> list[PaperTable]:
    """Tables 1 and 2 and the layouts, theirs beside ours."""
    longest = [
        PaperRow(f"{name}, batch {num}", theirs, longest_context(*kv, num), 0, "tokens", why)
        for name, kv, printed, why in (
            ("multi-head, 48 x 128, by heads", (48, 128, 48), ("1,320", "330"),
             "48 heads on 64 chips: 48-way sharding (64-way would give 1,777); exact 0.3 x 32 GiB"),
            ("multi-query, 1 x 256, by heads", (1, 256, 1), ("660", "165"),
             "one KV head is in every chip's memory; exact 0.3 x 32 GiB"),
            ("multi-query, 1 x 256, by batch", (1, 256, 64), ("43,000", "10,700"), "rounded there"),
        )
        for num, theirs in zip((128, 512), printed, strict=True)
    ]  # fmt: skip
    runs = (
        ("prefill, batch 1, int8, 2D", 2048, 0.29, "43 %"),
        ("decode, batch 64, int8, 2D", 64 * 64, 1.82, "14 %"),
        ("prefill, batch 512, bf16, gathered", 512 * 2048, 85.2, "76 %"),
        ("decode, batch 512, bf16, 2D", 512 * 64, 6.0, "33 %"),
    )
    use = [
        PaperRow(
            f"{name}, {seconds:g} s", theirs, 100 * flops_utilization(tokens, seconds), 1, "%",
            "" if theirs != "33 %" else "their time is rounded to 0.1 s",
        )
        for name, tokens, seconds, theirs in runs
    ]  # fmt: skip
    tokens, e, f = 512.0, PALM_WIDTH, PALM_FEED_FORWARD
    shares = [
        PaperRow(
            f"2D over 1D traffic, {n} chips",
            {16: "1", 64: "0.5"}.get(n, ""),
            stationary_2d(tokens, e, f, n, best_x(e, f, n)) / stationary_1d(tokens, e),
            3,
        )
        for n in (4, 16, 64, 256)
    ]
    best = [
        PaperRow(
            f"gather over so many of 64 chips, {num:,} tokens",
            "",
            best_gather(num, f, 64),
            1,
            why=f"least traffic: {layout(num, e, f, 64)}",
        )
        for num in (512, 65_536, 1_048_576)
    ]
    return [
        PaperTable(
            "Pope et al., table 1: longest context, PaLM 540B, 64 chips, 30 % for KV", longest
        ),
        PaperTable(
            "Pope et al., table 2: use of the peak, PaLM 540B, 64 chips, 2048 in / 64 out", use
        ),
        PaperTable(
            "Pope et al., section 3: layouts of the feed-forward layer",
            [*shares, *best],
            ["2D beats 1D where sqrt(n) > F/E: with F = 4E beyond 16 chips, which are a draw"],
        ),
    ]
