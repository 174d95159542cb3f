"""Every closed form beside a figure from elsewhere, to its printed digits."""

from __future__ import annotations

import math

import pytest

from services.planner.core.fetch import exposed_s, fetch_pays_from, pipeline_makespan
from services.planner.core.founding import (
    SLIDES_KV,
    TABLE_4,
    founding_tables,
    kv_mb_per_1000,
    rps_in_turn,
    rps_per_gpu,
)
from services.planner.core.kv_size import PUBLISHED, link_need, read_link
from services.planner.core.paper_table import PaperTable
from services.planner.core.partition import (
    best_gather,
    best_x,
    flops_utilization,
    gathered,
    layout,
    pope_tables,
    stationary_1d,
    stationary_2d,
)
from services.planner.core.prefill_queue import (
    crossover,
    queue_tables,
    ttft_pipeline,
    ttft_single,
    ttft_tensor,
)
from services.planner.paper_runs import mooncake_tables
from shared.errors import InvalidRequest

# --- DistServe's queues -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "single", "pipeline", "tensor_15", "tensor_18"),
    [(4.0, 0.6000, 0.23333, 0.20952, 0.15556), (4.9, 5.1000, 0.24804, 0.25897, 0.17751)],
)
def test_mean_time_to_first_token(
    rate: float, single: float, pipeline: float, tensor_15: float, tensor_18: float
) -> None:
    """D = 0.2 s."""
    assert round(ttft_single(rate, 0.2), 4) == single
    assert round(ttft_pipeline(rate, 0.2), 5) == pipeline
    assert round(ttft_tensor(rate, 0.2, 1.5), 5) == tensor_15
    assert round(ttft_tensor(rate, 0.2, 1.8), 5) == tensor_18


def test_the_paper_writes_the_same_for_two_devices() -> None:
    """Its own forms, of which ours are the general ones."""
    rate, d, k = 3.7, 0.21, 1.6
    load = rate * d
    assert ttft_pipeline(rate, d) == pytest.approx(d + rate * d * d / (4 * (2 - load)))
    assert ttft_tensor(rate, d, k) == pytest.approx(d / k + rate * d * d / (2 * k * (k - load)))


def test_a_full_queue_is_infinite() -> None:
    """At load 1 and beyond, not a negative time."""
    assert ttft_single(5.0, 0.2) == math.inf
    assert ttft_single(9.0, 0.2) == math.inf
    assert ttft_pipeline(9.0, 0.2) < math.inf


@pytest.mark.parametrize(("speedup", "load"), [(1.5, 0.936), (1.7, 1.257), (1.9, 1.626)])
def test_pipelines_win_from_a_load_on(speedup: float, load: float) -> None:
    """Below it tensor parallelism does."""
    assert round(crossover(speedup), 3) == load
    below, above = load - 0.05, load + 0.05
    assert ttft_tensor(below, 1.0, speedup) < ttft_pipeline(below, 1.0)
    assert ttft_tensor(above, 1.0, speedup) > ttft_pipeline(above, 1.0)


# --- KV: sizes, links, fetch or recompute ------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "two_bytes", "one_byte"),
    [
        ("7b", 524.288, 262.144),
        ("13b", 819.2, 409.6),
        ("30b", 1597.44, 798.72),
        ("65b", 2621.44, 1310.72),
    ],
)
def test_kv_of_a_thousand_tokens(size: str, two_bytes: float, one_byte: float) -> None:
    """The slides' figures are one-byte KV."""
    shape = PUBLISHED[f"llama-{size}"]
    assert kv_mb_per_1000(shape, 2) == pytest.approx(two_bytes, abs=1e-9)
    assert kv_mb_per_1000(shape, 1) == pytest.approx(one_byte, abs=1e-9)
    assert SLIDES_KV[size] == pytest.approx(one_byte, abs=0.05)


@pytest.mark.parametrize(
    ("model", "tokens", "at_25", "at_50", "digits"),
    [
        ("llama-2-70b", 512, 6.71, 3.36, 2),
        ("llama-2-70b", 1500, 19.66, 9.83, 2),
        ("llama-2-70b", 2048, 26.84, 13.42, 2),
        ("bloom-176b", 512, 82.2, 41.1, 1),
        ("bloom-176b", 2048, 328.8, 164.4, 1),
    ],
)
def test_milliseconds_on_a_link(
    model: str, tokens: int, at_25: float, at_50: float, digits: int
) -> None:
    """At 25 and 50 GB/s."""
    size = PUBLISHED[model].token_bytes * tokens
    assert round(size / 25e9 * 1e3, digits) == at_25
    assert round(size / 50e9 * 1e3, digits) == at_50


def test_sizes_that_papers_print() -> None:
    """OPT-66B (1.208 GB is their 1.13 GiB), LLaMA3-70B, BLOOM's 1.914 GiB."""
    size = PUBLISHED["opt-66b"].token_bytes * 512
    assert round(size / 1e9, 3) == 1.208
    assert round(size / 1024**3, 3) == 1.125
    assert round(size * 10 * 8 / 1e9, 1) == 96.6
    assert PUBLISHED["llama-3-70b"].token_bytes == 320 * 1024
    assert PUBLISHED["llama-2-70b"].layer_bytes == 4096
    assert round(PUBLISHED["bloom-176b"].token_bytes * 512 / 1024**3, 3) == 1.914


def test_bandwidth_has_two_bounds() -> None:
    """1.9 GB: 76 ms at 25 GB/s, 608 at 25 Gb/s; 40 ms needs 47.5 GB/s; ten a second 19."""
    assert round(1.9e9 / read_link("--link", "25GB/s") * 1e3, 1) == 76.0
    assert round(1.9e9 / read_link("--link", "25Gb/s") * 1e3) == 608
    assert round(1.9e9 / 50e9 * 1e3) == 38
    sustained, latency = link_need(10, 1.9e9, 0.040)
    assert round(latency / 1e9, 1) == 47.5
    assert round(sustained / 1e9, 1) == 19.0


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("200 Gb/s", 25e9), ("10GiB/s", 10 * 2**30), ("8Mbps", 1e6)],
)
def test_links_are_bytes_or_bits(text: str, rate: float) -> None:
    """B and b differ by eight."""
    assert read_link("--link", text) == rate


@pytest.mark.parametrize("text", ["", "25", "25GB", "0GB/s", "-1GB/s", "fast", "9" * 400 + "GB/s"])
def test_a_link_without_a_rate_is_refused(text: str) -> None:
    """Zero, too."""
    with pytest.raises(InvalidRequest, match="--link must be a rate above zero such as 25GB/s"):
        read_link("--link", text)


def test_a_fetch_pays_from() -> None:
    """Mooncake: 6 and 19 GB/s, rounded; B/G > 2 d s / (gqa (a p d + b d^2))."""
    shape = PUBLISHED["llama-3-70b"]
    assert round(fetch_pays_from(shape, 8192, 8 * 312e12) / 1e9, 2) == 5.86
    assert round(fetch_pays_from(shape, 8192, 8 * 989e12) / 1e9, 2) == 18.57
    d, p = 8192, 8192
    per_flops = 2 * d * 2 / (8 * (4 * p * d + 22 * d * d))
    assert fetch_pays_from(shape, p, 1.0) == pytest.approx(per_flops)


def test_layerwise_is_flat_in_length_and_serialized_is_not() -> None:
    """As long as computing a layer takes longer than sending it (Splitwise, figure 14)."""
    shape = PUBLISHED["llama-2-70b"]
    for n in (1000, 2000, 4000):
        left_s = exposed_s(shape, n, prefill_s=n * 1e-4, link=25e9)
        assert left_s == pytest.approx(shape.layer_bytes * n / 25e9)
    slow_s = exposed_s(shape, 1000, prefill_s=1e-9, link=25e9)
    assert slow_s == pytest.approx(80 * shape.layer_bytes * 1000 / 25e9)


def test_chunks_in_a_pipeline() -> None:
    """E(k,s) = max(E(k-1,s), E(k,s-1)) + c/S; equal chunks: (K + S - 1) c/S."""
    assert pipeline_makespan([1.0] * 5, 1) == 5.0
    assert pipeline_makespan([1.0] * 5, 4) == pytest.approx((5 + 3) / 4)
    assert pipeline_makespan([1.0, 2.0], 2) == pytest.approx(0.5 + 1.0 + 1.0)


# --- the founding documents' other figures -----------------------------------------------------


@pytest.mark.parametrize(
    ("mix", "rps"),
    [
        ((1, 1), 2.8),
        ((2, 1), 3.333),
        ((3, 2), 3.36),
        ((4, 2), 3.333),
        ((5, 3), 3.5),
        ((9, 5), 3.571),
    ],
)
def test_requests_per_gpu(mix: tuple[int, int], rps: float) -> None:
    """No mix is above one GPU that does both in turn."""
    assert round(rps_per_gpu(*mix), 3) == rps
    assert rps_per_gpu(*mix) < rps_in_turn()
    assert round(rps_in_turn(), 3) == 3.590
    assert rps_per_gpu(25, 14) == pytest.approx(rps_in_turn())


def test_ratios_of_table_4() -> None:
    """0.596 is the one that is printed wrong, as 0.70."""
    coding, conversation = TABLE_4["coding"], TABLE_4["conversation"]
    ratios = [round(h100 / a100, 3) for a100, h100 in coding]
    assert ratios == [0.514, 0.596, 0.576, 1.238, 1.0]
    ratios = [round(h100 / a100, 3) for a100, h100 in conversation]
    assert ratios == [0.542, 0.7, 0.683, 1.5, 1.19]
    tokens = [
        (e2e - ttft) / tbt
        for pairs in (coding, conversation)
        for ttft, tbt, e2e in zip(*pairs[:3], strict=True)
    ]
    assert tokens == pytest.approx([12.9, 12.8, 120.1, 118.0], abs=0.051)


def test_what_is_wrong_is_flagged() -> None:
    """The eight rows that a reader must not believe."""
    flagged = [row.what for t in founding_tables() for row in t.rows if "WRONG" in row.why]
    assert len(flagged) == 8
    assert sum("2-byte" in what for what in flagged) == 4


# --- Pope et al. --------------------------------------------------------------------------------


def test_longest_contexts() -> None:
    """Table 1, recomputed with exactly 0.3 x 32 GiB."""
    found = [round(row.ours) for row in pope_tables()[0].rows]
    assert found == [1333, 333, 666, 167, 42654, 10663]


@pytest.mark.parametrize(
    ("tokens", "seconds", "percent"),
    [(2048, 0.29, 43.3), (4096, 1.82, 13.8), (512 * 2048, 85.2, 75.5), (512 * 64, 6.0, 33.5)],
)
def test_use_of_the_peak(tokens: int, seconds: float, percent: float) -> None:
    """Table 2: 43, 14, 76 and 33 % there."""
    assert round(100 * flops_utilization(tokens, seconds), 1) == percent


def test_layouts() -> None:
    """2D beats 1D from 16 chips on, half the traffic at 64; gathering pays for many tokens."""
    e, f, tokens = 18432, 4 * 18432, 512.0

    def share(n: int) -> float:
        return stationary_2d(tokens, e, f, n, best_x(e, f, n)) / stationary_1d(tokens, e)

    assert share(16) == pytest.approx(1.0)
    assert share(64) == pytest.approx(0.5)
    assert best_x(e, f, 64) == pytest.approx(math.sqrt(64) / 2)
    best_2d = stationary_2d(tokens, e, f, 64, best_x(e, f, 64))
    assert best_2d == pytest.approx(8 * tokens * e / 8)
    many = 65536.0
    n = best_gather(many, f, 64)
    assert gathered(many, e, f, 64, n) == pytest.approx(4 * e * math.sqrt(many * f / 64))
    assert gathered(many, e, f, 64, 64) == pytest.approx(2 * e * f)
    for tokens in (1.0, many, 0.24 * 64 * f, 0.26 * 64 * f, 0.9 * 64 * f, 2.0 * 64 * f):
        least = min(gathered(tokens, e, f, 64, over) for over in range(1, 65))
        assert gathered(tokens, e, f, 64, best_gather(tokens, f, 64)) <= least
    assert [layout(b, e, f, 64) for b in (64, 1_048_576)] == ["2d", "gathered"]
    assert layout(64, e, f, 8) == "1d"


@pytest.mark.parametrize(
    "tables",
    [queue_tables, founding_tables, pope_tables, mooncake_tables],
    ids=lambda f: f.__name__,
)
def test_whoever_differs_by_more_than_rounding_says_why(tables: object) -> None:
    """A row whose printed figure is not ours has a reason beside it."""
    assert callable(tables)
    found: list[PaperTable] = tables()
    for table in found:
        for row in table.rows:
            number = row.theirs.replace(",", "").rstrip("x% GMKBbs/mi")
            if not number or row.why:
                continue
            _, _, decimals = number.partition(".")
            half = 0.51 * 10.0 ** -len(decimals)
            assert abs(float(number) - row.ours) <= half, row
