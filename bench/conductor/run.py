"""Does it pay to know who has which prefix? Mean time to first token, by policy.

    python -m bench.conductor.run [--quick] [--trace FILE] [--parts order sizes bursts]

Modelled: decisions, pools, journals and indices are production's; devices, links and time are not.
What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

from bench.conductor.prefill_pools import Outcome, Setting, simulate
from bench.plots import Bars, Pictures
from bench.record import Record, arguments, grouped, spread
from services.cli.bench.sources import SHAPES, read_trace
from services.cli.bench.workload import BLOCK_TOKENS, Ask, Load, plan
from shared.telemetry.definitions import percentiles

GOAL = 16
TICK_S = 3.0
"""Mooncake's trace tells arrivals to within this."""

ORDER = ("random", "least_loaded", "local", "conductor")
BESIDE = ("p2c", "hash")
"""What knows of no cache either, and is compared without a bar."""

SHAPE_RATE = 2.2
"""Requests a second of the built-in shape: it computes less of each prompt anew than the trace."""

SIZES = {
    "16 workers": {"num_workers": 16},
    "1,500 blocks a worker": {"num_blocks": 1500},
    "10 GB/s": {"link": 10e9},
    "1 gateway": {"num_gateways": 1},
}
"""What else the order must hold for, each beside 8 workers with 5,859 blocks, 50 GB/s and three
gateways; the last to see what gateways cost that do not know of each other's decisions."""

HITS = {True: 0.9, False: 0.85}
"""Least share of what one endless cache would hit: 0.33 of the trace's blocks; of the shape's."""

HOT_TOKENS = 8192
BURSTS = 20
BURST_EVERY_S = 8.0
BURST_PROMPTS = 96
"""Of 8 workers: 12 each, some four seconds of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. what: of the row. changed: of the setting."""

    what: str
    policy: str
    asks: Sequence[Ask]
    changed: dict[str, Any] = field(default_factory=dict)
    look_at: Sequence[float] = ()


# --- what is sent ---------------------------------------------------------------------------------


def spread_in_ticks(asks: Sequence[Ask], tick_s: float) -> list[Ask]:
    """Spread what arrives at one tick over the time until the next, in order."""
    rng, spread_asks = random.Random(0), list[Ask]()
    for at, group in groupby(asks, key=lambda ask: ask.due_s):
        same = list(group)
        times = sorted(at + rng.uniform(0.0, tick_s) for _ in same)
        spread_asks += [replace(ask, due_s=due_s) for ask, due_s in zip(same, times, strict=True)]
    return spread_asks


def asks_of(trace: Path | None, num_requests: int | None) -> list[Ask]:
    """Return the requests of a trace, or of the built-in shape of such a trace."""
    if trace is not None:
        return spread_in_ticks(read_trace(trace).rows[:num_requests], TICK_S)
    load = Load(rate=SHAPE_RATE, num_requests=num_requests or 8000)
    return list(plan(SHAPES["mooncake"], load).asks)


def bursts(num_bursts: int) -> Iterator[Ask]:
    """One hot prefix, and a question of its own to each; all of a burst within 10 ms."""
    rng, hot = random.Random(0), tuple(range(HOT_TOKENS // BLOCK_TOKENS))
    next_id = len(hot)
    for number in range(num_bursts):
        times = sorted(
            number * BURST_EVERY_S + rng.uniform(0.0, 0.01) for _ in range(BURST_PROMPTS)
        )
        for due_s in times:
            num_input = HOT_TOKENS + rng.randrange(512, 4096)
            num_own = -(-(num_input - HOT_TOKENS) // BLOCK_TOKENS)
            ids = (*hot, *range(next_id, next_id + num_own))
            next_id += num_own
            yield Ask(num_input=num_input, num_output=256, due_s=due_s, block_ids=ids)


# --- one run --------------------------------------------------------------------------------------


def run_job(job: Job) -> dict[str, Any]:
    """Run one job; its row."""
    began_s = time.process_time()
    setting = Setting(policy=job.policy, **job.changed)
    found = simulate(setting, job.asks, job.look_at)
    row: dict[str, Any] = {
        "what": job.what,
        "policy": job.policy,
        "num_workers": setting.num_workers,
        "num_gateways": setting.num_gateways,
        "num_blocks": setting.num_blocks,
        "link": setting.link,
        "report_s": setting.report_s,
        **summary(found),
        "cpu_s": time.process_time() - began_s,
    }
    if job.look_at:
        row["longest_over_mean"] = [
            max(queues) / statistics.mean(queues) for queues in found.queues
        ]
    return row


def summary(found: Outcome) -> dict[str, Any]:
    times = [ttft_s for _, ttft_s in found.prompts]
    prompts = [prompt for prompt, _ in found.prompts]
    fetched = [prompt.num_fetched for prompt in prompts if prompt.decision.fetch is not None]
    errors = [
        abs(prompt.decision.prediction.ttft_s - ttft_s) / ttft_s
        for prompt, ttft_s in found.prompts
        if prompt.decision.prediction is not None
    ]
    return {
        "requests": len(times),
        "ttft_s": {
            "mean": statistics.mean(times),
            **dict(zip(("p50", "p90", "p99"), percentiles(times, (50, 90, 99)), strict=True)),
        },
        "hit": sum(prompt.num_cached for prompt in prompts)
        / BLOCK_TOKENS
        / sum(len(prompt.ask.block_ids) for prompt in prompts),
        "fetches": len(fetched),
        "stale_fetches": fetched.count(0),
        "late_fetches": found.num_late_fetches,
        "error_p50": percentiles(errors, (50,))[0] if errors else None,
        "load_checks": found.num_checks,
        "resyncs": found.num_resyncs,
    }


def report(row: dict[str, Any]) -> None:
    ttft = row["ttft_s"]
    longest = row.get("longest_over_mean")
    print(
        f"{row['what']:22} {row['policy']:13} TTFT mean {ttft['mean']:6.2f} p50 {ttft['p50']:5.2f} "
        f"p90 {ttft['p90']:6.2f} p99 {ttft['p99']:6.2f} s  hits {row['hit']:.3f}  "
        f"{row['fetches']} fetches, {row['stale_fetches']} in vain"
        + (f"  longest queue {max(longest):.2f} x mean" if longest else "")
        + f"  ({row['cpu_s']:.0f} s of CPU)",
        flush=True,
    )


def ideal(asks: Sequence[Ask]) -> float:
    """Return the hits of one cache without end, as a share of all blocks: of whole ones, and the
    last token of a prompt is computed in any case."""
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for ask in asks:
        num_blocks += len(ask.block_ids)
        findable = ask.block_ids[: (ask.num_input - 1) // BLOCK_TOKENS]
        num_hits += sum(1 for _ in takewhile(seen.__contains__, findable))
        seen.update(ask.block_ids[: ask.num_input // BLOCK_TOKENS])
    return num_hits / num_blocks


# --- what is compared -----------------------------------------------------------------------------


def set_goals(record: Record, *, is_trace: bool) -> None:
    """Note the order of means and the hits, and how even the queues of bursts are. is_trace: the
    bars are the trace's; of the built-in shape the order alone is asked."""
    for what, own in grouped(record.rows, "what").items():
        rows = {row["policy"]: row for row in own}
        if "longest_over_mean" in next(iter(rows.values())):
            longest = rows["conductor"]["longest_over_mean"]
            record.goal(GOAL, f"{what}: longest queue / mean, worst", max(longest), "<=", 1.5)
            continue
        mean = {policy: row["ttft_s"]["mean"] for policy, row in rows.items()}
        for one, other in pairwise(ORDER):
            if one in mean and other in mean:
                is_strict = is_trace and what == "order" and one != "random"
                bound = 0.9 if is_strict else 1.0
                ratio = mean[other] / mean[one]
                record.goal(GOAL, f"{what}: mean TTFT, {other} / {one}", ratio, "<", bound)
        if what == "order":
            share = rows["conductor"]["hit"] / record.environment["ideal"]
            record.goal(
                GOAL, f"{what}: conductor's hits / one endless cache", share, ">=", HITS[is_trace]
            )


def jobs_of(asked: argparse.Namespace, asks: Sequence[Ask]) -> Iterator[Job]:
    if "order" in asked.parts:
        for policy in (*BESIDE, *ORDER):
            yield Job(what="order", policy=policy, asks=asks)
    if "sizes" in asked.parts:
        for what, changed in SIZES.items():
            policies = ORDER[2:] if "num_gateways" not in changed else ORDER[-1:]
            for policy in policies:
                yield Job(what=what, policy=policy, asks=asks, changed=changed)
    if "bursts" in asked.parts:
        num_bursts = 4 if asked.quick else BURSTS
        look_at = [number * BURST_EVERY_S + 0.02 for number in range(num_bursts)]
        for policy in ORDER[1:]:
            asks = list(bursts(num_bursts))
            yield Job(what="bursts", policy=policy, asks=asks, look_at=look_at)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """Means and hits of each policy; random is left out, or nothing else would be seen."""
    steady = grouped((row for row in rows if row["what"] != "bursts"), "policy")
    means = {
        policy: {row["what"]: spread([row["ttft_s"]["mean"]]) for row in steady.get(policy, ())}
        for policy in (*BESIDE, *ORDER[1:])
    }
    hits = {"hits": {row["policy"]: spread([row["hit"]]) for row in rows if row["what"] == "order"}}
    pictures = [Bars("Mean TTFT (modelled)", "s", {k: v for k, v in means.items() if v})]
    if hits["hits"]:
        pictures.append(Bars("Blocks found in a cache", "share of all", hits))
    return {"": pictures}


def main() -> None:
    """Run all jobs, as many at once as asked for, print, write."""
    parser = arguments(__doc__, "few requests, prints only")
    parts = ("order", "sizes", "bursts")
    parser.add_argument("--trace", type=Path, help="Mooncake's JSONL; else a built-in shape")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--at-once", type=int, default=2, help="runs, each in a process of its own")
    asked = parser.parse_args()
    if asked.quick:
        asked.parts = [part for part in asked.parts if part != "sizes"]
        asked.requests = asked.requests or 1500
    asks = asks_of(asked.trace, asked.requests)
    load = asked.trace.name if asked.trace else "mooncake, built in"
    record = Record.of(__file__, asked, modelled=True, load=load, ideal=ideal(asks))
    print(f"{len(asks)} requests; one endless cache would hit {record.environment['ideal']:.3f}")
    with ProcessPoolExecutor(asked.at_once) as processes:
        for row in processes.map(run_job, jobs_of(asked, asks)):
            record.add(row)
            report(row)
    set_goals(record, is_trace=asked.trace is not None)
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
