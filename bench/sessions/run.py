"""What is it worth to know who has which KV? Conversations through five real workers, by policy.

    python -m bench.sessions.run [--quick] [--policies least_loaded local conductor]

Each policy gets a mesh of its own, three prefill and two decode workers with the native CPU engine,
and the same requests at the same times. README.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.disaggregation.run import VOCAB, make_model
from bench.record import Record, ratios, spread
from services.cli.bench.endpoints import fit_of, open_endpoints
from services.cli.bench.open_loop import new_event_loop, run_open_loop
from services.cli.bench.records import Ending, Run
from services.cli.bench.sources import Lengths, Sessions
from services.cli.bench.workload import Fit, Load, Workload, plan
from services.local import local_mesh, plan_services, wait_for_pair
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig

HERE: Final = Path(__file__).parent
BASE, BEST = "least_loaded", "conductor"
POLICIES: Final = (BASE, "local", BEST)
NUM_PREFILL, NUM_DECODE = 3, 2

SOURCE: Final = Sessions(
    "mooncake", Lengths(6909, 20_000, 20_000), Lengths(350, 597, 2000), new_share=0.25, num_open=16
)
"""Mooncake's conversations (services/cli/bench/sources.py), the longest cut, fewer at once."""

FIT: Final = Fit(scale=0.25, max_input=1920, max_output=24)
"""A block of the trace is 128 tokens then: what gateways are told of prefixes."""
BLOCK_SIZE: Final = 16


@contextlib.asynccontextmanager
async def a_mesh(folder: Path, policy: str) -> AsyncGenerator[str]:
    """Start five workers and a gateway."""
    common: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "threads": 1, "kv_gib": 0.5,
    }  # fmt: skip
    gateway = GatewayConfig(
        model=str(folder), policy=policy, http_port=0, grpc_port=0, mesh_port=0, max_waiting=4096
    )
    services = plan_services(
        gateway, [PrefillConfig(**common)] * NUM_PREFILL, [DecodeConfig(**common)] * NUM_DECODE
    )
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "log"
        async with local_mesh(services, log=log, restart=False) as mesh:
            await wait_for_pair(mesh.http_url, 120)
            async with asyncio.timeout(240):
                while log.read_text().count("KV pool is resident") < NUM_PREFILL + NUM_DECODE:
                    await asyncio.sleep(0.2)
            yield mesh.http_url


def most_cached(workload: Workload) -> int:
    """Return how many prompt tokens a cache would have that forgets nothing and is everybody's at
    once: whole blocks of the longest beginning that came before, the last token never."""
    known: dict[tuple[int, ...], int] = {}  # beginnings, and how many of their tokens were there
    total = 0
    for ask in workload.asks:
        starts = [ask.block_ids[:num] for num in range(1, len(ask.block_ids) + 1)]
        cached = max((known.get(start, 0) for start in starts), default=0)
        total += min(cached, ask.num_input - 1) // BLOCK_SIZE * BLOCK_SIZE
        for num, start in enumerate(starts, 1):
            num_tokens = min(num * workload.block_tokens, ask.num_input)
            known[start] = max(known.get(start, 0), num_tokens)
    return total


async def ask(folder: Path, policy: str, load: Load, seed: int) -> tuple[Run, Workload]:
    """Send one draw of requests through one mesh."""
    async with a_mesh(folder, policy) as url, open_endpoints([url]) as endpoints:
        fit = fit_of(endpoints, FIT)
        warm_up = plan(SOURCE, Load(rate=1.0, num_requests=6, seed=10_000 + seed), fit)
        await run_open_loop(endpoints, warm_up, prompt_seed=10_000 + seed, vocab=VOCAB - 100)
        workload = plan(SOURCE, load, fit)
        return await run_open_loop(
            endpoints, workload, prompt_seed=seed, vocab=VOCAB - 100
        ), workload


def row_of(run: Run, workload: Workload) -> dict[str, Any]:
    """What one run was."""
    if not run.records:
        sys.exit("no request fell into the run: give more --seconds or --rate")
    assert all(it.end is Ending.COMPLETE for it in run.records), "not every request was answered"
    ttfts = sorted(it.times[0] - it.due_at for it in run.records)
    prompt_tokens = sum(it.num_input for it in workload.asks)
    return {
        "requests": len(ttfts),
        "prompt_tokens": prompt_tokens,
        "ttft_mean_s": statistics.fmean(ttfts),
        "ttft_p50_s": ttfts[len(ttfts) // 2],
        "ttft_p90_s": ttfts[len(ttfts) * 9 // 10],
        "hit": sum(it.num_cached for it in run.records) / prompt_tokens,
        "bound": most_cached(workload) / prompt_tokens,
    }


async def measure(record: Record, policies: Sequence[str], asked: argparse.Namespace) -> None:
    """Each repetition draws requests anew and gives them to every policy."""
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "m"
        make_model(folder)
        for repetition in range(asked.repetitions):
            load = Load(rate=asked.rate, duration_s=asked.seconds, seed=asked.seed + repetition)
            for policy in policies:
                run, workload = await ask(folder, policy, load, asked.seed + repetition)
                row = row_of(run, workload)
                found[policy].append(row)
                record.rows.append({"policy": policy, "repetition": repetition, **row})
                print(
                    f"{repetition + 1}/{asked.repetitions} {policy:14} {row['requests']} requests, "
                    f"TTFT mean {row['ttft_mean_s']:.2f} p50 {row['ttft_p50_s']:.2f} "
                    f"p90 {row['ttft_p90_s']:.2f} s, "
                    f"hit {row['hit']:.3f} of at most {row['bound']:.3f}",
                    file=sys.stderr,
                    flush=True,
                )
    if BASE in found and BEST in found:
        base, best = ([row["ttft_mean_s"] for row in found[name]] for name in (BASE, BEST))
        what = f"{NUM_PREFILL}+{NUM_DECODE} workers, conversations: mean TTFT, {BASE} / {BEST}"
        record.goal(17, what, ratios(base, best), ">=", 1.5)
        missing = spread([row["bound"] - row["hit"] for row in found[BEST]])
        record.goal(17, f"{BEST}: share of prompts below the bound of hits", missing, "<=", 0.03)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short repetition, prints only")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="those to ask")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second")
    parser.add_argument("--seconds", type=float, default=90.0, help="arrivals of a run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write results of a quick run too")
    asked = parser.parse_args()
    if asked.quick:
        asked.repetitions, asked.seconds = 1, min(asked.seconds, 30.0)
    record = Record(HERE, asked.quick)
    record.environment["load"] = f"{asked.rate:g} requests/s for {asked.seconds:g} s"
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(record, asked.policies, asked))
    record.finish(write=True if asked.record else None)


if __name__ == "__main__":
    main()
