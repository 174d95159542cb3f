"""How late are the event loops of a mesh under load?

    python -m bench.loop_lag.run [--quick] [--streams 12] [--pauses 1 0] [--repetitions 5]
                                 [--prefills 1 2] [--priorities ordinary realtime]

Gateway, prefill and decode as real processes with the bundled model, then with a second prefill
worker, so that the gateway chooses by ``conductor`` and keeps an index of prefixes; this process is
their only client and streams over HTTP, with pauses and without. Every process samples its loop's
lag ten times a second and tells it on /metrics. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.cpu import QUIET_CORES, cpu_s, machine_cpu_s
from bench.mesh import REALTIME, a_mesh, add_priorities
from bench.plots import Bars, Pictures
from bench.record import Record, arguments, grouped, spread
from bench.servers import events
from shared.config import DecodeConfig, PrefillConfig
from tests.support.service_process import free_port

GOAL_MS = 2.0
"""p99, while there are cores left: with pauses."""

PROCESSES = {
    "gateway": "gateway", "prefill": "prefill-0", "prefill, second": "prefill-1",
    "decode": "decode-0",
}  # fmt: skip
"""What figures are told of, and its name in a mesh. The first word is that of its metrics."""
CLIENT_NICENESS = 10
"""Of this process, which in life is on another machine: the mesh's threads go first."""

MOST_TRIES = 3
"""Times the repetitions asked for."""

WARM_UP_S = 3.0
MAX_TOKENS = 64
NOUNS = ("door", "box", "key", "house", "garden", "ship", "tower", "river", "bridge", "lamp")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")


# --- the lag, as the processes tell it ------------------------------------------------------------


@dataclass(frozen=True)
class Lag:
    """A histogram: samples per bucket, and each bucket's upper bound in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def since(self, earlier: Lag) -> Lag:
        counts = tuple(b - a for a, b in zip(earlier.counts, self.counts, strict=True))
        return Lag(self.bounds, counts)

    def plus(self, other: Lag) -> Lag:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Lag(self.bounds, counts)

    @property
    def num_samples(self) -> int:
        return int(sum(self.counts))

    def quantile_ms(self, share: float) -> float:
        """Interpolated within its bucket."""
        rank, below = share * sum(self.counts), 0.0
        for low, high, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                top = low if math.isinf(high) else high
                return (low + (top - low) * (rank - below) / count) * 1e3
            below += count
        return 0.0

    @property
    def max_ms(self) -> float:
        """Upper bound of the highest bucket that holds a sample."""
        return max((b for b, n in zip(self.bounds, self.counts, strict=True) if n), default=0) * 1e3


def read_lag(text: str, role: str) -> Lag:
    """Take the lag out of a page of metrics."""
    name = f"pdmesh_{role}_loop_lag_seconds"
    for family in text_string_to_metric_families(text):
        if family.name == name:
            cumulative = sorted(
                (float(sample.labels["le"]), sample.value)
                for sample in family.samples
                if sample.name.endswith("_bucket")
            )
            counts = [b - a for a, b in pairwise([0.0, *(value for _, value in cumulative)])]
            return Lag(tuple(bound for bound, _ in cumulative), tuple(counts))
    sys.exit(f"{role} tells no {name}")


@dataclass(frozen=True)
class Reading:
    """All processes at one instant.

    core_wait_s: how long each loop's thread was ready to run and had no core, ever. own_cpu_s:
    spent by the mesh and by this client. all_cpu_s: by everybody on this machine.
    """

    at: float
    lags: dict[str, Lag]
    core_wait_s: dict[str, float]
    own_cpu_s: float
    all_cpu_s: float


Span = tuple[Reading, Reading]
"""Before and after."""


class Probe:
    """Reads all processes. The loop runs on a process's main thread."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: dict[str, str], pids: dict[str, int]
    ) -> None:
        self._session = session
        self._urls = urls
        self._pids = pids

    async def read(self) -> Reading:
        lags: dict[str, Lag] = {}
        for role, url in self._urls.items():
            async with self._session.get(f"{url}/metrics") as response:
                response.raise_for_status()
                lags[role] = read_lag(await response.text(), role.partition(",")[0])
        return Reading(
            at=time.perf_counter(),
            lags=lags,
            core_wait_s={role: core_wait_s(pid) for role, pid in self._pids.items()},
            own_cpu_s=sum(cpu_s(pid) for pid in (*self._pids.values(), os.getpid())),
            all_cpu_s=machine_cpu_s(),
        )


def cores_of_others(span: Span) -> float:
    """Cores that neither the mesh nor this client used, on average."""
    first, last = span
    all_s, own_s = last.all_cpu_s - first.all_cpu_s, last.own_cpu_s - first.own_cpu_s
    return (all_s - own_s) / (last.at - first.at)


def core_wait_s(pid: int) -> float:
    """Seconds that a process's main thread stood in a core's queue (the kernel's run delay)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


# --- the load -------------------------------------------------------------------------------------


class Load:
    """A fixed number of clients; each streams one answer after the other.

    pause_s: between two answers of a client, on average (exponential)."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, model: str, seed: int
    ) -> None:
        self._session = session
        self._model = model
        self._url = f"{base_url}/v1/completions"
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self.pause_s = 0.0
        self.num_answers = 0
        self.num_chunks = 0

    def _prompt(self) -> str:
        """30 to 60 sentences, about 400 to 800 tokens; the first one is like no other."""
        pick = self._random
        first = f"Note {next(self._numbers)} of {pick.randrange(1000)}. "
        return first + " ".join(
            f"The code of the {pick.choice(COLOURS)} {pick.choice(NOUNS)} is "
            f"{pick.randrange(1000, 10_000)}."
            for _ in range(pick.randrange(30, 60))
        )

    async def run(self) -> None:
        """One client; runs until cancelled."""
        while True:
            if self.pause_s:
                await asyncio.sleep(self._random.expovariate(1 / self.pause_s))
            body = {
                "model": self._model,
                "prompt": self._prompt(),
                "max_tokens": MAX_TOKENS,
                "stream": True,
                "ignore_eos": True,
            }
            async with self._session.post(self._url, json=body) as response:
                async for _ in events(response):
                    self.num_chunks += 1
            self.num_answers += 1


# --- the measurement ------------------------------------------------------------------------------


async def measure(
    asked: argparse.Namespace, seconds: float, repetitions: int, priority: str, num_prefill: int
) -> list[dict[str, Any]]:
    """Start the mesh, measure it idle, then under each load, and stop it; one row a load."""
    common: dict[str, Any] = {"realtime": priority == REALTIME}
    decode_port, *prefill_ports = (free_port() for _ in range(1 + num_prefill))
    prefills = [PrefillConfig(metrics_port=port, threads=1, **common) for port in prefill_ports]
    decode = DecodeConfig(metrics_port=decode_port, threads=1, **common)
    async with (
        a_mesh(prefills, [decode], **common) as mesh,
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        ) as session,
    ):
        os.nice(CLIENT_NICENESS)
        urls = {"gateway": mesh.http_url, "decode-0": f"http://127.0.0.1:{decode_port}"}
        for number, port in enumerate(prefill_ports):
            urls[f"prefill-{number}"] = f"http://127.0.0.1:{port}"
        by_name = {service.name: service.pid for service in mesh.services}
        here = {role: name for role, name in PROCESSES.items() if name in by_name}
        urls = {role: urls[name] for role, name in here.items()}
        pids = {role: by_name[name] for role, name in here.items()}
        probe = Probe(session, urls, pids)
        load = Load(session, mesh.http_url, await served_model(session, mesh.http_url), 1)
        before = await probe.read()
        await asyncio.sleep(seconds)
        idle = (before, await probe.read())
        rows: list[dict[str, Any]] = []
        for pause_s in asked.pauses:
            load.pause_s = pause_s
            row = {"priority": priority, "pause_s": pause_s, "num_prefill": num_prefill}
            row |= await measure_load(probe, load, idle, asked.streams, seconds, repetitions)
            show(row, asked.streams)
            rows.append(row)
        return rows


def rows_of(*job: Any) -> list[dict[str, Any]]:
    return uvloop.run(measure(*job))


async def served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/v1/models") as response:
        return (await response.json())["data"][0]["id"]


async def measure_load(
    probe: Probe, load: Load, idle: Span, num_streams: int, seconds: float, repetitions: int
) -> dict[str, Any]:
    """Warm up, then repeat under the same load until enough repetitions were quiet; of too many
    tries the quietest count."""
    spans: list[Span] = []
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(load.run()) for _ in range(num_streams)]
        await asyncio.sleep(WARM_UP_S)
        answers, chunks = load.num_answers, load.num_chunks
        while len(spans) < MOST_TRIES * repetitions:
            before = await probe.read()
            await asyncio.sleep(seconds)
            spans.append((before, await probe.read()))
            if sum(cores_of_others(span) <= QUIET_CORES for span in spans) >= repetitions:
                break
        first, last = spans[0][0], spans[-1][1]
        took_s = last.at - first.at
        loaded = sorted(spans, key=cores_of_others)[:repetitions]
        whole = {
            "answers_per_s": (load.num_answers - answers) / took_s,
            "chunks_per_s": (load.num_chunks - chunks) / took_s,
            "cores_of_ours": (last.own_cpu_s - first.own_cpu_s) / took_s,
            "cores_of_others": max(cores_of_others(span) for span in loaded),
            "tries": len(spans),
        }
        for client in clients:
            client.cancel()
    if load.num_answers == answers:
        sys.exit("not one answer came: measure longer")
    return {**whole, "roles": {role: figures(role, idle, loaded) for role in first.lags}}


def figures(role: str, idle: Span, loaded: list[Span]) -> dict[str, Any]:
    """One process: quantiles over all samples under load, p99 of each repetition, and idle."""

    def lag_in(span: Span) -> Lag:
        return span[1].lags[role].since(span[0].lags[role])

    all_samples = lag_in(loaded[0])
    for span in loaded[1:]:
        all_samples = all_samples.plus(lag_in(span))
    took_s = sum(last.at - first.at for first, last in loaded)
    waited_s = sum(last.core_wait_s[role] - first.core_wait_s[role] for first, last in loaded)
    return {
        "samples": all_samples.num_samples,
        "p50_ms": all_samples.quantile_ms(0.5),
        "p99_ms": all_samples.quantile_ms(0.99),
        "max_ms_at_most": all_samples.max_ms,
        "share_within_goal": share_within(all_samples, GOAL_MS),
        "p99_ms_of_repetitions": spread([lag_in(span).quantile_ms(0.99) for span in loaded]),
        "share_without_core": waited_s / took_s,
        "idle_p50_ms": lag_in(idle).quantile_ms(0.5),
        "idle_p99_ms": lag_in(idle).quantile_ms(0.99),
        "idle_samples": lag_in(idle).num_samples,
        "buckets_s": [bound for bound in all_samples.bounds if not math.isinf(bound)],
        "counts": list(all_samples.counts),
    }


def share_within(lag: Lag, limit_ms: float) -> float:
    """Share of the samples in buckets up to the limit."""
    within = sum(n for b, n in zip(lag.bounds, lag.counts, strict=True) if b * 1e3 <= limit_ms)
    return within / max(1, lag.num_samples)


def case_of(row: dict[str, Any]) -> str:
    """Return the priority, and how many prefill workers there were if not one."""
    num_prefill = row.get("num_prefill", 1)  # before 2026-11-30 there was always one
    return row["priority"] + (f", {num_prefill} prefill" if num_prefill > 1 else "")


def show(result: dict[str, Any], num_streams: int) -> None:
    """Print the comparison with the goal."""
    print(
        f"{case_of(result)}: {num_streams} streams, pauses of {result['pause_s']:g} s: "
        f"{result['answers_per_s']:.1f} answers/s, {result['chunks_per_s']:.0f} chunks/s\n"
        f"of {os.cpu_count()} cores {result['cores_of_ours']:.1f} ours, "
        f"{result['cores_of_others']:.1f} others' at most ({result['tries']} tries); "
        f"loop lag in ms, goal p99 < {GOAL_MS:g}",
        flush=True,
    )
    for role, row in result["roles"].items():
        verdict = "met" if row["p99_ms"] < GOAL_MS else "MISSED"
        again = row["p99_ms_of_repetitions"]
        print(
            f"  {role:15} p50 {row['p50_ms']:6.2f}   p99 {row['p99_ms']:6.2f} "
            f"[{again['min']:.2f} .. {again['max']:.2f}]   max <= {row['max_ms_at_most']:7.2f}   "
            f"{row['share_within_goal']:.1%} within   {verdict}   "
            f"(idle p50 {row['idle_p50_ms']:.2f}, p99 {row['idle_p99_ms']:.2f}; "
            f"{row['samples']} samples; without a core for {row['share_without_core']:.0%} of time)"
        )


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """p99 of each process, with ordinary and real-time priority, one prefill worker and more: one
    panel a load."""
    panels: list[Bars] = []
    for of in grouped(rows, "pause_s").values():
        bars = {
            case_of(row): {
                role: found["p99_ms_of_repetitions"] for role, found in row["roles"].items()
            }
            for row in of
        }
        cores = statistics.mean(row["cores_of_ours"] for row in of)
        panels.append(Bars(f"{cores:.1f} cores busy (CPU)", "p99, ms late", bars, GOAL_MS))
    return {"": panels}


def main() -> None:
    parser = arguments(__doc__, "one short repetition, not recorded")
    parser.add_argument("--streams", type=int, default=12, help="answers at once")
    parser.add_argument(
        "--pauses", nargs="+", type=float, default=[1.0, 0.0], metavar="S",
        help="one load each: mean pause of a client between its answers, 0 = as fast as it goes",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=12.0, help="of one repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--prefills", nargs="+", type=int, choices=(1, 2), default=[1, 2],
        help="one mesh each; with two the gateway chooses by conductor and keeps an index",
    )  # fmt: skip
    add_priorities(parser)
    chosen = parser.parse_args()
    seconds, repetitions = chosen.seconds, chosen.repetitions
    if chosen.quick:
        seconds, repetitions = min(seconds, 5.0), 1
    settings = {"streams": chosen.streams, "seconds": seconds, "max_tokens": MAX_TOKENS}
    record = Record.of(__file__, chosen, **settings)
    for priority in chosen.priorities:
        for num_prefill in chosen.prefills:
            # In a process of its own: a mesh would inherit the niceness of the client before it.
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
                job = (chosen, seconds, repetitions, priority, num_prefill)
                record.rows += process.submit(rows_of, *job).result()
    for row in record.rows:
        if row["pause_s"]:
            for role, figures_of in row["roles"].items():
                p99 = figures_of["p99_ms_of_repetitions"]
                what = f"{case_of(row)}, {role}, torch computing, cores left: p99 in ms"
                record.goal(8, what, p99, "<=", GOAL_MS)
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
