"""What the tables of drawn runs must show, whatever the machine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.cli.bench.sources import SHAPES
from services.planner.core.paper_table import PaperTable
from services.planner.paper_runs import (
    mooncake_times,
    muxserve_tables,
    orca_tables,
    pool_ttft,
    rejections,
    sarathi_tables,
)
from services.sim.asks import Ask
from services.sim.baselines.mooncake import PrefillPool


def figures(tables: list[PaperTable]) -> dict[str, float]:
    """Ours, by what they are."""
    return {row.what: row.ours for table in tables for row in table.rows}


def test_muxserve_shares_gains_and_follows_what_is_asked_for() -> None:
    """Never below one mesh for each model; blocks go where popularity went, and prefills take
    turns."""
    found = figures(muxserve_tables(60))
    assert found["throughput over one mesh for each model, best"] >= 1.8
    assert found["the same, mean"] >= 1.0
    assert found["sequences that run, of those asked for, quotas as placed"] < 50
    assert found["the same, quotas adapted over 20 periods"] > 95
    assert found["turns of the model with most over that with least, prefills and decodes"] == 1


def test_orca_lets_nobody_overtake() -> None:
    """A newcomer waits for one iteration at most; stages work at once."""
    found = figures(orca_tables())
    assert found["batches in which a later request was an iteration ahead"] == 0
    assert found["longest wait of a newcomer under light load, over the longest iteration"] <= 1
    assert found["tokens/s of 4 pipeline stages over 1, batches of 8"] > 2


@pytest.mark.slow
def test_sarathi_bounds_gaps_at_a_small_price() -> None:
    """The budget that fits the limit serves most, under either limit."""
    found = figures(sarathi_tables())
    assert found["worst gap, budget of 512 tokens, over its bound"] <= 1
    assert (
        0
        < found["what chunks of 2048 cost it"]
        < found["what chunks of 512 cost a prompt of 8192"]
        <= 25
    )
    strict = [
        found[f"requests/s, budget {b}, P99 of gaps 5 decode steps (strict)"] for b in (256, 2048)
    ]
    relaxed = [
        found[f"requests/s, budget {b}, P99 of gaps 25 decode steps (relaxed)"] for b in (256, 2048)
    ]
    assert strict[0] > strict[1]
    assert relaxed[1] > relaxed[0] >= strict[0]


def trace(num: int, rate: float) -> list[Ask]:
    """Conversations that share prefixes, by Poisson: lengths as Mooncake's trace has them."""
    rng = random.Random(0)
    at, requests = 0.0, list[Ask]()
    for ask, _ in zip(SHAPES["mooncake"].asks(rng), range(num), strict=False):
        requests.append(replace(ask, due_s=at))
        at += rng.expovariate(rate)
    return requests


def test_mooncakes_order_of_scheduling_rules() -> None:
    """By chance, by queues, by own prefixes, by anybody's: each is quicker than the one before."""
    ttfts = list(pool_ttft(trace(3000, 3.4)).values())
    assert ttfts == sorted(ttfts, reverse=True)
    assert ttfts[0] > 2 * ttfts[1]


def test_rejecting_earlier_wastes_less_prefill() -> None:
    """Stage by stage, at arrival, at arrival with a look ahead."""
    found = rejections(trace(6000, 6.8))
    wasted = [one.wasted_s for one in found.values()]
    assert wasted == sorted(wasted, reverse=True)
    assert wasted[2] < 0.8 * wasted[0]


def test_fetch_local_or_compute_follows_bandwidth_queue_and_threshold() -> None:
    """The three branches of algorithm 1, each by moving one parameter."""
    times = mooncake_times()
    prompt = Ask(num_input=8192, num_output=10, block_ids=tuple(range(16)))

    def chosen(pool: PrefillPool, busy_s: float) -> tuple[int, int]:
        pool.nodes[0].keep(prompt.block_ids)
        pool.nodes[0].free_at = busy_s
        _, node, tokens = pool.expect(prompt)
        return node, tokens

    def pool(fetch_factor: float = 1.0, threshold: float = 1.0) -> PrefillPool:
        slow = type(times)(times.prefill_s, times.fetch_s_per_token * fetch_factor, times.step_s)
        return PrefillPool(
            2, 100, slow, "global", random.Random(0).randrange, balancing_threshold=threshold
        )

    assert chosen(pool(), 0.0) == (0, 8191)  # local: it is there, and nobody waits
    assert chosen(pool(), 5.0) == (1, 8191)  # fetched: the queue there is longer than the way
    assert chosen(pool(fetch_factor=1000.0), 5.0) == (1, 0)  # computed: the link is too slow
    half = pool(threshold=2.0)
    half.nodes[1].keep(prompt.block_ids[:8])
    assert chosen(half, 5.0) == (1, 4096)  # computed: twice as long a prefix is not enough
