"""What is it worth to know who has which KV? Conversations through five real workers, by policy.

    python -m bench.sessions.run [--quick] [--policies least_loaded local conductor]

Each policy gets a mesh of its own, three prefill and two decode workers with the native CPU engine,
and the same requests at the same times; the last one also one worker of each role, with a core
each, and fewer requests. How far off its predictions were is in every row. README.md has the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import uvloop

from bench.disaggregation.run import VOCAB, make_model
from bench.mesh import a_mesh
from bench.record import Record, arguments, ratios, spread
from services.cli.bench.endpoints import fit_of, open_endpoints
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.records import Ending, Run
from services.cli.bench.sources import Lengths, Sessions
from services.cli.bench.workload import Fit, Load, Workload, plan
from services.local import LocalMesh
from shared.config import DecodeConfig, PrefillConfig
from shared.telemetry.definitions import percentiles

BASE, BEST = "least_loaded", "conductor"
POLICIES: Final = (BASE, "local", BEST)
NUM_PREFILL, NUM_DECODE = 3, 2
ALONE_SHARE: Final = 0.25
"""Of the requests a second, to one worker of each role."""

SOURCE: Final = Sessions(
    "mooncake", Lengths(6909, 20_000, 20_000), Lengths(350, 597, 2000), new_share=0.25, num_open=16
)
"""Mooncake's conversations (services/cli/bench/sources.py), the longest cut, fewer at once."""

FIT: Final = Fit(scale=0.25, max_input=1920, max_output=24)
"""A block of the trace is 128 tokens then: what gateways are told of prefixes."""
BLOCK_SIZE: Final = 16


class Mesh(NamedTuple):
    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}"


def workers_of(
    folder: Path, policy: str, mesh: Mesh
) -> contextlib.AbstractAsyncContextManager[LocalMesh]:
    common: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "threads": 1, "kv_gib": 0.5,
    }  # fmt: skip
    prefills = [PrefillConfig(**common)] * mesh.num_prefill
    decodes = [DecodeConfig(**common)] * mesh.num_decode
    gateway: dict[str, Any] = {"model": str(folder), "policy": policy, "max_waiting": 4096}
    return a_mesh(prefills, decodes, is_resident=True, **gateway)


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


async def ask(folder: Path, policy: str, mesh: Mesh, load: Load, seed: int) -> dict[str, Any]:
    """Send one draw of requests through one mesh; what it was."""
    async with (
        workers_of(folder, policy, mesh) as running,
        open_endpoints([running.http_url]) as endpoints,
    ):
        fit = fit_of(endpoints, FIT)
        warm_up = plan(SOURCE, Load(rate=1.0, num_requests=6, seed=10_000 + seed), fit)
        await run_open_loop(endpoints, warm_up, prompt_seed=10_000 + seed, vocab=VOCAB - 100)
        workload = plan(SOURCE, load, fit)
        run = await run_open_loop(endpoints, workload, prompt_seed=seed, vocab=VOCAB - 100)
        return row_of(run, workload) | errors_of(
            await explained(running.http_url, len(run.records))
        )


async def explained(url: str, num_requests: int) -> list[dict[str, Any]]:
    """What a gateway says of its last requests: decisions with their predictions, and receipts."""
    async with aiohttp.ClientSession(url, raise_for_status=True) as session:

        async def told(path: str) -> dict[str, Any]:
            async with session.get(path) as answer:
                return await answer.json()

        recent = (await told("/cluster/requests"))["requests"][-num_requests:]
        return [await told(f"/cluster/requests/{it['request_id']}") for it in recent]


def errors_of(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By what share predictions were off, of what was. Of the time that a prompt is computed where
    its cache was what the gateway thought, so that it was that work which was predicted."""
    service, ttft = list[float](), list[float]()
    for request in requests:
        receipt, predicted = request["receipt"], request["decisions"][-1]["prediction"]
        if predicted is None:  # its worker had not said how long its steps take
            continue
        ttft.append(abs(receipt["predicted_ttft_s"] - receipt["ttft_s"]) / receipt["ttft_s"])
        if receipt["cached_tokens"] == receipt["predicted_cached_tokens"]:
            service.append(
                abs(predicted["prefill_s"] - receipt["prefill_s"]) / receipt["prefill_s"]
            )
    return {
        "predicted": len(ttft),
        "ttft_error_p50": statistics.median(ttft) if ttft else None,
        "service_predicted": len(service),
        "service_mape": statistics.fmean(service) if service else None,
    }


def row_of(run: Run, workload: Workload) -> dict[str, Any]:
    if not run.records:
        sys.exit("no request fell into the run: give more --seconds or --rate")
    assert all(it.end is Ending.COMPLETE for it in run.records), "not every request was answered"
    ttfts = [it.times[0] - it.due_at for it in run.records]
    p50, p90 = percentiles(ttfts, (50, 90))
    prompt_tokens = sum(it.num_input for it in workload.asks)
    return {
        "requests": len(ttfts),
        "prompt_tokens": prompt_tokens,
        "ttft_mean_s": statistics.fmean(ttfts),
        "ttft_p50_s": p50,
        "ttft_p90_s": p90,
        "hit": sum(it.num_cached for it in run.records) / prompt_tokens,
        "bound": most_cached(workload) / prompt_tokens,
    }


async def measure(record: Record, policies: Sequence[str], asked: argparse.Namespace) -> None:
    """Each repetition draws requests anew and gives them to every policy."""
    many, alone = Mesh(NUM_PREFILL, NUM_DECODE), Mesh(1, 1)
    runs = [(policy, many, asked.rate) for policy in policies]
    if alone != many:
        runs.append((policies[-1], alone, asked.rate * ALONE_SHARE))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "m"
        make_model(folder)
        for repetition in range(asked.repetitions):
            seed = asked.seed + repetition
            for policy, mesh, rate in runs:
                load = Load(rate=rate, duration_s=asked.seconds, seed=seed)
                row = await ask(folder, policy, mesh, load, seed)
                about = {"policy": policy, "mesh": str(mesh), "repetition": repetition}
                record.add({**about, **row})
                print(f"{repetition + 1}/{asked.repetitions} {line(record.rows[-1])}", flush=True)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']:14} {row['mesh']} {row['requests']} requests, "
        f"TTFT mean {row['ttft_mean_s']:.2f} p50 {row['ttft_p50_s']:.2f} "
        f"p90 {row['ttft_p90_s']:.2f} s, hit {row['hit']:.3f} of at most {row['bound']:.3f}, "
        f"predictions off by {row['ttft_error_p50'] or 0:.0%} of TTFT (p50), "
        f"{row['service_mape'] or 0:.0%} of the time computed (mean)"
    )


def note_goals(record: Record) -> None:
    """Ratios within a repetition, and the best policy's predictions where each worker has a core
    and where five share two."""

    def values(policy: str, mesh: str, what: str) -> list[float]:
        return [
            row[what]
            for row in record.rows
            if (row["policy"], row["mesh"]) == (policy, mesh) and row[what] is not None
        ]

    many = str(Mesh(NUM_PREFILL, NUM_DECODE))
    base, best = (values(policy, many, "ttft_mean_s") for policy in (BASE, BEST))
    if base and best:
        what = f"{many} workers, conversations: mean TTFT, {BASE} / {BEST}"
        record.goal(17, what, ratios(base, best), ">=", 1.5)
        bound, hit = (values(BEST, many, what) for what in ("bound", "hit"))
        missing = spread([most - had for most, had in zip(bound, hit, strict=True)])
        record.goal(17, f"{BEST}: share of prompts below the bound of hits", missing, "<=", 0.03)
    for mesh in dict.fromkeys((many, str(Mesh(1, 1)))):
        for what, name, bound in (
            ("service_mape", "time computed, mean error of predictions", 0.10),
            ("ttft_error_p50", "TTFT, median error of predictions", 0.15),
        ):
            if errors := values(BEST, mesh, what):
                record.goal(17, f"{mesh} workers: {name}", spread(errors), "<=", bound)


def main() -> None:
    parser = arguments(__doc__, "one short repetition, prints only")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="those to ask")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second")
    parser.add_argument("--seconds", type=float, default=90.0, help="arrivals of a run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.quick:
        asked.repetitions, asked.seconds = 1, min(asked.seconds, 30.0)
    load = f"{asked.rate:g} requests/s for {asked.seconds:g} s"
    record = Record.of(__file__, asked, load=load)
    uvloop.run(measure(record, asked.policies, asked))
    note_goals(record)
    record.finish()


if __name__ == "__main__":
    main()
