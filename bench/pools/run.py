"""Who attains more with the same four workers: homes that are fixed, or pools that move?

    python -m bench.pools.run [--quick] [--parts step rates] [--loads azure-conv mooncake]

Modelled: all code of the mesh runs, under virtual time; only what a step takes on a device, and the
network below it, are models. Each load goes to all systems. What the numbers mean: README.md beside
this file.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import structlog

from bench.disaggregation.run import LOADS
from bench.plots import Panel, Pictures, Spread
from bench.record import Record, arguments, grouped, spread
from services.cli.bench.prompts import Prompts
from services.cli.bench.workload import Load, Workload, plan
from services.gateway.core.routing.pools import Pool, pool_of
from shared.engine.base import OnLayer
from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.step import RowResult, StepRow
from shared.telemetry.definitions import RequestOutcome, Slo, attainment, percentiles
from tests.support.virtual_loop import run_virtual
from tests.support.whole_mesh import WholeMesh, whole_mesh

NUM_WORKERS = 4
MOVING = "moving pools"


class System(NamedTuple):
    """Four workers. num_prompt: whose home is prompts; all others are at home with tokens."""

    num_prompt: int
    policy: str = "least_loaded"
    moves: bool = False


SYSTEMS = {
    MOVING: System(2, "splitwise", moves=True),
    "1 + 3 fixed": System(1),
    "2 + 2 fixed": System(2),
    "3 + 1 fixed": System(3),
    "2 + 2 conductor": System(2, "conductor"),
}

TIMING = FakeTiming(
    base_s=0.02, prefill_token_s=1e-4, decode_row_s=1e-4, context_token_s=1e-7
)  # fmt: skip
"""The device: 10,000 prompt tokens a second, 20 ms for a token of an answer that is alone, and 0.1
ms more for each answer beside it and for each 1,000 tokens of its context."""

TBT_TARGET_S = 0.05
"""Of a step that computes prompts beside answers: the default."""

NUM_BLOCKS, BLOCK_TOKENS = 3072, 16
"""What a worker holds."""

MODEL = FakeModel(max_model_len=8192, num_layers=1, num_kv_heads=1)
SLO = Slo(ttft_s=1.0, tpot_s=0.06)
"""The longest prompt takes 0.4 to 0.6 s alone, a token 20 ms."""

LOOK_EVERY_S = 0.25
BIN_S = 2.5

RATES = {"azure-conv": (12.0, 16.0, 20.0), "mooncake": (3.0, 4.5, 6.0)}
STEP_RATE = {"azure-conv": 6.0, "mooncake": 2.0}
FACTOR = 3
"""Of the rate in the middle third of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One load for one system. rate: of a step, before and after it. seconds: of arrivals; of a
    step, of each third."""

    part: str
    load: str
    system: str
    rate: float
    seconds: float
    seed: int = 0

    def workload(self) -> Workload:
        """Return the requests: the same for all systems."""
        load = Load(
            rate=self.rate, duration_s=self.seconds, arrivals="poisson", seed=self.seed
        )  # fmt: skip
        whole = plan(LOADS[self.load], load)
        if self.part == "rates":
            return whole
        lengths = iter(LOADS[self.load].asks(random.Random(f"step lengths {self.seed}")))
        times = self._step_times(random.Random(f"step {self.seed}"))
        return replace(whole, asks=tuple(replace(next(lengths), due_s=at) for at in times))

    def _step_times(self, arrivals: random.Random) -> Iterator[float]:
        at = 0.0
        while True:
            is_spike = self.seconds <= at < 2 * self.seconds
            at += arrivals.expovariate(self.rate * (FACTOR if is_spike else 1))
            if at >= 3 * self.seconds:
                return
            yield at


class TimedEngine(FakeEngine):
    """Takes its time, and computes nothing: exactness is the tests' question, and would be most of
    a run's CPU here."""

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """See ``Engine.step``."""
        if on_layer is not None:
            for layer in range(MODEL.num_layers):
                on_layer(layer)
        return [RowResult(-1 if row.sample is None else 1) for row in rows]


# --- one run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """What one system did with one workload. mixed: when, and how many workers were mixed then."""

    outcomes: list[RequestOutcome]
    mixed: list[tuple[float, int]]
    num_borrowed: int
    """Answers whose prompt, or whose tokens, were computed by a worker of the other home."""


async def serve(job: Job) -> Found:
    """Start a mesh, send all at their times, and wait until all is answered and everyone home."""
    system = SYSTEMS[job.system]
    worker = {
        "movable": system.moves,
        "batch_tokens": 512,
        "transfer_mode": "layerwise",
        "tbt_target_s": TBT_TARGET_S,
    }
    workload = job.workload()
    prompts = Prompts(workload, job.seed, MODEL.vocab_size)
    outcomes: list[RequestOutcome] = []
    mixed: list[tuple[float, int]] = []
    num_borrowed = 0
    async with whole_mesh(
        num_prefill=system.num_prompt,
        num_decode=NUM_WORKERS - system.num_prompt,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        gateway={"policy": system.policy, "max_waiting": 4096},
        prefill=worker,
        decode=worker,
        timing=TIMING,
        model=MODEL,
        engine=TimedEngine,
    ) as mesh:
        now = asyncio.get_running_loop().time
        began_at = now()
        prompt_homes = {f"{running.incarnation:016x}" for running in mesh.prefills}

        async def ask(index: int) -> None:
            nonlocal num_borrowed
            due_at = began_at + workload.asks[index].due_s
            await asyncio.sleep(due_at - now())
            wanted = workload.asks[index].num_output
            answer = await mesh.ask(prompts.ids(index), wanted)
            is_complete = answer.error is None and len(answer.token_ids) == wanted
            outcomes.append(
                RequestOutcome(
                    due_at - began_at, [at - began_at for at in answer.arrived_at], is_complete
                )
            )
            receipt = answer.receipt
            if receipt:
                num_borrowed += (
                    receipt["prefill"] not in prompt_homes or receipt["decode"] in prompt_homes
                )

        async def watch() -> None:
            while True:
                mixed.append((now() - began_at, num_mixed(mesh)))
                await asyncio.sleep(LOOK_EVERY_S)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            async with asyncio.TaskGroup() as asking:
                for index in range(len(workload.asks)):
                    asking.create_task(ask(index))
            await mesh.until(lambda: not num_mixed(mesh))
            await asyncio.sleep(2 * BIN_S)  # and they stay so
            watching.cancel()
    return Found(sorted(outcomes, key=lambda it: it.arrived_at), mixed, num_borrowed)


def num_mixed(mesh: WholeMesh) -> int:
    """How many workers hold foreign work, as the gateway sees it."""
    return sum(pool_of(worker) is Pool.MIXED for worker in mesh.gateways[0].members.table.workers)


def run_job(job: Job) -> dict[str, Any]:
    """Run one job in a process of its own; its row."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began_at = time.monotonic()
    found = run_virtual(serve(job))
    ttft = [it.ttft_s for it in found.outcomes if it.ttft_s is not None]
    row: dict[str, Any] = {
        "part": job.part,
        "load": job.load,
        "system": job.system,
        "rate": job.rate,
        "seconds": job.seconds,
        "seed": job.seed,
        "requests": len(found.outcomes),
        "failed": sum(not it.is_complete for it in found.outcomes),
        "attainment": attainment(found.outcomes, SLO),
        "ttft_s": quantiles(ttft),
        "tpot_s": quantiles([it.tpot_s for it in found.outcomes if len(it.token_times) > 1]),
        "borrowed": found.num_borrowed,
        "mixed_mean": statistics.mean(num for _, num in found.mixed),
        "took_s": time.monotonic() - began_at,
    }
    if job.part == "step":
        row["thirds"] = [
            attainment(
                [it for it in found.outcomes if third <= it.arrived_at / job.seconds < third + 1],
                SLO,
            )
            for third in range(3)
        ]
        row["bins"] = list(bins_of(found))
    return row


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Half, nine tenths, and nearly all."""
    return dict(zip(("p50", "p90", "p99"), percentiles(values, (50, 90, 99)), strict=True))


def bins_of(found: Found) -> Iterator[dict[str, Any]]:
    """What came to pass in each few seconds, by the requests that arrived in them."""
    ends_at = max(found.outcomes[-1].arrived_at, found.mixed[-1][0])
    for number in range(math.ceil(ends_at / BIN_S)):
        here = [it for it in found.outcomes if number == int(it.arrived_at / BIN_S)]
        mixed = [num for at, num in found.mixed if number == int(at / BIN_S)]
        row: dict[str, Any] = {"at_s": (number + 0.5) * BIN_S, "requests": len(here)}
        if mixed:
            row["mixed"] = statistics.mean(mixed)
        if here:
            row["attainment"] = attainment(here, SLO)
            row["ttft_s"] = quantiles([it.ttft_s for it in here if it.ttft_s is not None])
            row["tbt_s"] = quantiles([gap for it in here for gap in it.tbt_s])
        yield row


def report(row: dict[str, Any]) -> None:
    ttft, tpot = row["ttft_s"], row["tpot_s"]
    thirds = "".join(f" {share:.2f}" for share in row.get("thirds", ()))
    print(
        f"{row['load']:10} {row['part']:5} rate {row['rate']:5.1f}  {row['system']:13} attained "
        f"{row['attainment']:.3f}{thirds} of {row['requests']}  TTFT p50 {ttft['p50']:.2f} p90 "
        f"{ttft['p90']:.2f} p99 {ttft['p99']:.2f} s  TPOT p50 {tpot['p50'] * 1e3:.0f} p90 "
        f"{tpot['p90'] * 1e3:.0f} p99 {tpot['p99'] * 1e3:.0f} ms  {row['borrowed']} borrowed, "
        f"{row['mixed_mean']:.1f} mixed  ({row['took_s']:.0f} s here)",
        flush=True,
    )


# --- what is compared -----------------------------------------------------------------------------


def attained_at(rows: Sequence[dict[str, Any]]) -> dict[float, dict[str, float]]:
    """Return every system's attainment at each rate, the mean of its draws of arrivals."""
    return {rate: attained_by_system(own) for rate, own in sorted(grouped(rows, "rate").items())}


def attained_by_system(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return every system's attainment, the mean of its draws of arrivals."""
    return {
        name: statistics.mean(row["attainment"] for row in own)
        for name, own in grouped(rows, "system").items()
    }


def set_goals(record: Record, load: str) -> None:
    """Note what moving pools attain more than the best fixed split: at the rate where that is the
    least, beside whichever split is the best there; in the mean of rates, beside the one split that
    has the best mean; and while a step lasts."""
    of = [row for row in record.rows if row["load"] == load]
    at = attained_at([row for row in of if row["part"] == "rates"])
    if at:
        fixed = [name for name in next(iter(at.values())) if name != MOVING]
        more = [found[MOVING] - max(found[name] for name in fixed) for found in at.values()]
        mean = {one: statistics.mean(it[one] for it in at.values()) for one in (MOVING, *fixed)}
        what = f"{load}: attained more than the best split"
        record.goal(14, f"{what}, the least of all rates", min(more), ">=", 0.0)
        best = max(mean[name] for name in fixed)
        record.goal(14, f"{what}, the mean of rates", mean[MOVING] - best, ">", 0.0)
    steps = attained_by_system([row for row in of if row["part"] == "step"])
    if steps:
        best = max(share for name, share in steps.items() if name != MOVING)
        what = f"{load}: attained more than the best split, step x {FACTOR}"
        record.goal(14, what, steps[MOVING] - best, ">", 0.0)


# --- pictures -------------------------------------------------------------------------------------


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """A step over time and attainment over rates, a picture of each for each load."""
    pictures: dict[str, list[Panel]] = {}
    for load, own in grouped(rows, "load").items():
        steps = [row for row in own if (row["part"], row["seed"]) == ("step", 0)]
        if steps:
            when = "s after the start; requests by arrival"
            title = f"{load}, load x {FACTOR} in the middle third (modelled)"
            pictures[f"-step-{load}"] = [
                Panel(title, when, "attained", over_time(steps, "attainment"), False),
                Panel(
                    "", when, "p90 of TTFT, s", over_time(steps, "ttft_s", "p90"), False, SLO.ttft_s
                ),
                Panel(
                    "",
                    when,
                    "p99 of time between tokens, s",
                    over_time(steps, "tbt_s", "p99"),
                    False,
                ),
                Panel(
                    "",
                    "s after the start",
                    "workers that are mixed",
                    over_time(steps[:1], "mixed"),
                    False,
                ),
            ]
        asked = [row for row in own if row["part"] == "rates"]
        if asked:
            pictures[f"-rates-{load}"] = [
                Panel(f"{load} (modelled)", "requests/s", "attained", over_rates(asked), False)
            ]
    return pictures


def over_time(
    rows: Sequence[dict[str, Any]], key: str, quantile: str = ""
) -> dict[str, list[tuple[float, Spread]]]:
    return {
        row["system"]: [
            (one["at_s"], spread([one[key][quantile] if quantile else one[key]]))
            for one in row["bins"]
            if key in one
        ]
        for row in rows
    }


def over_rates(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, Spread]]]:
    """Return a line for each system, with the spread of its draws of arrivals."""
    return {
        name: [
            (rate, spread([row["attainment"] for row in own]))
            for rate, own in sorted(grouped(of, "rate").items())
        ]
        for name, of in grouped(rows, "system").items()
    }


def jobs_of(asked: argparse.Namespace) -> list[Job]:
    """Return what is to be run, the systems of one load after each other."""
    jobs: list[Job] = []
    for load in asked.loads:
        wanted = [("rates", rate, asked.seconds) for rate in asked.rates or RATES[load]]
        if "rates" not in asked.parts:
            wanted = []
        if "step" in asked.parts:
            wanted.insert(0, ("step", asked.step_rate or STEP_RATE[load], asked.step_seconds))
        jobs += [
            Job(part=part, load=load, system=system, rate=rate, seconds=seconds, seed=seed)
            for part, rate, seconds in wanted
            for seed in range(asked.seeds)
            for system in asked.systems
        ]
    return jobs


def main() -> None:
    """Run all jobs, as many at once as asked for, print, write."""
    parser = arguments(__doc__, "one load, short, prints only")
    parser.add_argument("--parts", nargs="+", choices=("step", "rates"), default=("step", "rates"))
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rates", nargs="+", type=float, help="requests/s instead of each load's")
    parser.add_argument("--seeds", type=int, default=1, help="draws of lengths and arrivals")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--step-rate", type=float, help="requests/s before and after the step")
    parser.add_argument("--step-seconds", type=float, default=10.0, help="of each third")
    parser.add_argument("--at-once", type=int, default=2, help="runs, each in a process of its own")
    asked = parser.parse_args()
    if asked.quick:
        asked.loads, asked.rates = asked.loads[:1], asked.rates or [9.0]
        asked.seconds, asked.step_seconds = 5.0, 4.0
    about = {
        "modelled": True,
        "base_s": TIMING.base_s,
        "token_s": TIMING.prefill_token_s,
        "num_blocks": NUM_BLOCKS,
        "tbt_target_s": TBT_TARGET_S,
        "slo": [SLO.ttft_s, SLO.tpot_s],
    }
    record = Record.of(__file__, asked, **about)
    with ProcessPoolExecutor(asked.at_once) as processes:
        for row in processes.map(run_job, jobs_of(asked)):
            record.add(row)
            report(row)
    for load in asked.loads:
        if MOVING in asked.systems and len(asked.systems) > 1:
            set_goals(record, load)
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
