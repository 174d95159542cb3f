"""The figures of the three founding documents, recomputed; the wrong ones are flagged.

D0: a text on prefill/decode separation; D1: one on inference optimisation; D2: slides.
"""

from __future__ import annotations

from typing import Final

from services.planner.core.kv_size import PUBLISHED, KvShape, link_need
from services.planner.core.paper_table import PaperRow, PaperTable

PREFILL_RPS: Final = 5.6
DECODE_RPS: Final = 10.0
"""Of one A100: OPT-13B, 512 in, 64 out, under its SLOs (DistServe, section 2)."""

SLIDES_KV: Final = {"7b": 262.1, "13b": 409.6, "30b": 798.72, "65b": 1310.7}
"""D2: MB a 1000 tokens, beside fp16 weights."""

TABLE_4: Final = {
    # A100, H100: TTFT ms, TBT ms, E2E ms, cost $, energy Wh; Splitwise, table IV, P50.
    "coding": ((185, 95), (52, 31), (856, 493), (0.42, 0.52), (1.37, 1.37)),
    "conversation": ((155, 84), (40, 28), (4957, 3387), (2.4, 3.6), (7.9, 9.4)),
}
_RATIOS: Final = {
    "coding": ("0.51", "0.70", "0.58", "1.24", "1"),
    "conversation": ("0.54", "0.70", "0.68", "1.5", "1.2"),
}
_NAMES: Final = ("TTFT", "TBT", "E2E", "cost", "energy")


def kv_mb_per_1000(shape: KvShape, bytes_per_element: int) -> float:
    """Return MB (1e6) a 1000 tokens."""
    return shape.token_bytes / shape.bytes_per_element * bytes_per_element * 1000 / 1e6


def rps_per_gpu(num_prefill: int, num_decode: int) -> float:
    """Return requests/s a GPU of a mix, by its slower side."""
    rps = min(num_prefill * PREFILL_RPS, num_decode * DECODE_RPS)
    return rps / (num_prefill + num_decode)


def rps_in_turn() -> float:
    """Return requests/s of one GPU that does both in turn: no mix is above it."""
    return 1 / (1 / PREFILL_RPS + 1 / DECODE_RPS)


def founding_tables() -> list[PaperTable]:
    """All of it; a row without a reason is right as printed."""
    return [_sizes(), _links(), _mixes(), _ratios()]


def _sizes() -> PaperTable:
    rows: list[PaperRow] = []
    for size, theirs in SLIDES_KV.items():
        shape = PUBLISHED[f"llama-{size}"]
        rows += [
            PaperRow(
                f"D2, KV of 1000 tokens, {size}, 2-byte elements",
                f"{theirs:g}",
                kv_mb_per_1000(shape, 2),
                2,
                "MB",
                "WRONG: half of it; theirs is 1-byte KV beside fp16 weights",
            ),
            PaperRow(
                "D2, the same, 1-byte elements", f"{theirs:g}", kv_mb_per_1000(shape, 1), 2, "MB"
            ),
        ]
    opt = PUBLISHED["opt-66b"]
    size = opt.token_bytes * 512
    rows += [
        PaperRow("DistServe, OPT-66B, 512 tokens", "1.13 GB", size / 1e9, 3, "GB",
                 "theirs is GiB: 1.125"),
        PaperRow("DistServe, the same at 10 requests/s", "90 Gb/s", size * 10 * 8 / 1e9, 1, "Gb/s",
                 "theirs read GiB as GB"),
    ]  # fmt: skip
    return PaperTable("Sizes of KV", rows)


def _links() -> PaperTable:
    kv = 1.9e9
    sustained, latency = link_need(10, kv, 0.040)
    rows = [
        PaperRow("D0, 1.9 GB at 25 GB/s", "40 ms", kv / 25e9 * 1e3, 1, "ms",
                 "WRONG: 40 ms is 1.0 GB, or 47.5 GB/s"),
        PaperRow("D0, 1.9 GB at 25 Gb/s, if that was meant", "40 ms", kv / (25e9 / 8) * 1e3, 0,
                 "ms", "WRONG"),
        PaperRow("bandwidth that moves 1.9 GB in 40 ms", "", latency / 1e9, 1, "GB/s"),
        PaperRow("bandwidth for ten such a second", "", sustained / 1e9, 1, "GB/s"),
        PaperRow("BLOOM-176B, 512 tokens", "", PUBLISHED["bloom-176b"].token_bytes * 512 / 1024**3,
                 3, "GiB", "which may be the 1.9 of D0"),
    ]  # fmt: skip
    note = (
        "D0's 'bandwidth = QPS x KV / TTFT' has the unit bytes/s^2: WRONG unless QPS means "
        "requests in flight. Two bounds count: rate x KV, and KV / the time that hides it."
    )
    return PaperTable("Bandwidth", rows, [note])


def _mixes() -> PaperTable:
    mixes = ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (9, 5))
    printed = {(1, 1): "2.8", (2, 1): "3.3"}
    rows = [
        PaperRow(
            f"D1, {p}P + {d}D, requests/s a GPU", printed.get((p, d), ""), rps_per_gpu(p, d), 3
        )
        for p, d in mixes
    ]
    gain = (rps_per_gpu(2, 1) / rps_per_gpu(1, 1) - 1) * 100
    rows += [
        PaperRow("D1, gain of 2P + 1D", "18 %", gain, 2, "%", "from the rounded 3.3"),
        PaperRow("one GPU in turn: the bound of every mix", "", rps_in_turn(), 3,
                 why="WRONG argument of D1: 2.8 is two separate GPUs, not one that does both"),
        PaperRow("D2, goodput under SLOs", "2x", rps_per_gpu(2, 1) / 1.6, 2, "x"),
    ]  # fmt: skip
    note = (
        "So 'disaggregation raises throughput' does not follow; what it raises is goodput under "
        "SLOs. Ideal P:D is 10 : 5.6 = 25 : 14. D1's '2.3x throughput' of chunked prefill is "
        "DeepSpeed-FastGen's claim, not Sarathi's."
    )
    return PaperTable("Throughput (OPT-13B, 512 in, 64 out, one A100: 5.6 and 10)", rows, [note])


def _ratios() -> PaperTable:
    rows: list[PaperRow] = []
    for workload, pairs in TABLE_4.items():
        for name, (a100, h100), theirs in zip(_NAMES, pairs, _RATIOS[workload], strict=True):
            is_wrong = (workload, name) == ("coding", "TBT")
            why = "WRONG: misprint, there as in the paper; 52 and 31 ms fit the other columns"
            rows.append(
                PaperRow(
                    f"D2, table IV, {workload}, {name} H100/A100",
                    theirs,
                    h100 / a100,
                    3,
                    why=why if is_wrong else "",
                )
            )
        first, gap, whole = pairs[:3]
        rows += [
            PaperRow(f"output tokens that {workload} on {gpu} implies", "", (w - f) / g, 2)
            for gpu, f, g, w in zip(("A100", "H100"), first, gap, whole, strict=True)
        ]
    return PaperTable("Splitwise's table IV in the slides (Llama-70B, P50, no batching)", rows)
