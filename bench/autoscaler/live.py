"""Does the autoscaler decide over real processes what it decides in the simulator?

    python -m bench.autoscaler.live [--quick]

A mesh of real processes with ``--planner act`` and the real-time fake engine gets a load for ten
minutes; then the simulator gets the same arrivals, the same step times and the start-up that was
measured. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import aiohttp

from bench.autoscaler.run import Ask, Felt, Setting, attained, simulate
from bench.autoscaler.scaled import LOOK_S
from bench.record import Record, arguments
from bench.servers import events
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import Rules
from services.sim.worker import WorkerSize
from shared.predict.times import AffineTimes
from shared.telemetry.definitions import RequestOutcome, Slo
from tests.support.command import pdmesh

GOAL = 19
STEP_S: Final = 0.2
"""A step of the fake engine, whatever is in it: long beside what HTTP and loops take."""

RATES: Final = ((0.0, 3.3), (90.0, 10.0), (300.0, 3.3))
"""From when on, requests a second: a prefill worker computes five."""

PROMPT, ANSWER, BLOCKS = 40, 41, 384
"""Tokens, and blocks of a worker: 75 answers fill a decode worker, each for eight seconds."""

DWELL_S: Final = 120.0
LIMITS = Limits(ttft_s=2.0, tpot_s=0.5)
MOST_WORKERS = 8
SECONDS: Final = 600.0
POLL_S: Final = 0.25


class Wanted(NamedTuple):
    """So many workers of a kind were wanted from then on."""

    at_s: float
    kind: str
    num: int


class Run(NamedTuple):
    """What came of one load, live or simulated. startup_s: as the gateway measured it last."""

    changes: list[Wanted]
    felt: list[Felt]
    startup_s: float


def asks(rates: Sequence[tuple[float, float]], seconds: float, seed: int) -> Iterator[Ask]:
    """Draw Poisson arrivals, all of one size."""
    draw, at_s = random.Random(seed), 0.0
    ends = [*(began for began, _ in rates[1:]), seconds]
    for (began, rate), end in zip(rates, ends, strict=True):
        at_s = max(at_s, began)
        while (at_s := at_s + draw.expovariate(rate)) < end:
            yield Ask(at_s, PROMPT, ANSWER)


class LiveLoad:
    """Asks a mesh, and watches what its planner wants."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._loop = asyncio.get_running_loop()
        self.felt: list[Felt] = []

    async def planner(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/cluster") as response:
            return (await response.json())["planner"]

    async def until_it_looked(self) -> float:
        """Return when it looked last; at once after."""
        before = (await self.planner())["num_looks"]
        while (await self.planner())["num_looks"] == before:
            await asyncio.sleep(0.02)
        return self._loop.time()

    async def run(self, load: Sequence[Ask], seconds: float) -> Run:
        """Ask from the next look on, and until all has been answered."""
        began_s = await self.until_it_looked()
        changes: list[Wanted] = []
        before = (await self.planner())["wanted"] or {"prefill": 1, "decode": 1}
        startup_s = 0.0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_all(load, began_s, tasks))
            while (now_s := self._loop.time() - began_s) < seconds:
                told = await self.planner()
                startup_s = told["startup_s"] or startup_s
                for kind, num in told["wanted"].items():
                    if num != before[kind]:
                        changes.append(Wanted(round(now_s, 2), kind, num))
                        print(f"live: {now_s:6.1f} s  {kind} {before[kind]} -> {num}", flush=True)
                before = told["wanted"] or before
                await asyncio.sleep(POLL_S)
        return Run(changes, sorted(self.felt), startup_s)

    async def _ask_all(self, load: Sequence[Ask], began_s: float, tasks: asyncio.TaskGroup) -> None:
        for number, ask in enumerate(load):
            await asyncio.sleep(began_s + ask.at_s - self._loop.time())
            tasks.create_task(self._ask(number, ask))

    async def _ask(self, number: int, ask: Ask) -> None:
        body = {
            # No two prompts begin alike.
            "prompt": [3 + number % 50, 3 + number // 50, *[3] * (ask.num_prompt - 2)],
            "max_tokens": ask.num_output,
            "ignore_eos": True,
            "stream": True,
            "ttft_ms": LIMITS.ttft_s * 1000,
            "tpot_ms": LIMITS.tpot_s * 1000,
        }
        asked_s, times = self._loop.time(), list[float]()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status not in (429, 503):
                times = [self._loop.time() async for _ in events(response)]
        outcome = RequestOutcome(asked_s, times, bool(times))
        self.felt.append(Felt(ask.at_s, outcome.meets(Slo(LIMITS.ttft_s, LIMITS.tpot_s))))


async def run_live(load: Sequence[Ask], seconds: float) -> Run:
    flags = (
        *("--engine", "fake", "--device", "cpu", "--port", "0", "--prefill", "1", "--decode", "1"),
        *("--num-blocks", str(BLOCKS), "--policy", "least_loaded", "--planner", "act"),
        *("--max-workers", str(MOST_WORKERS)),
        *("--planner-ttft-s", str(LIMITS.ttft_s), "--planner-tpot-s", str(LIMITS.tpot_s)),
    )
    variables = {
        "PDMESH_FAKE_STEP_S": str(STEP_S),
        "PDMESH_BATCH_TOKENS": "1",
        "PDMESH_PLANNER_DWELL_S": str(DWELL_S),
    }
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        pdmesh("up", *flags, limit_s=seconds + 120.0, **variables) as mesh,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        return await LiveLoad(session, await mesh.url()).run(load, seconds)


def run_simulated(load: Sequence[Ask], seconds: float, startup_s: float) -> Run:
    """Give the simulator the same."""
    setting = Setting(
        AffineTimes(
            base_s=STEP_S, prompt_token_s=0.0, decode_row_s=0.0, context_token_s=0.0
        ),
        WorkerSize(num_blocks=BLOCKS, batch_tokens=1),
        Rules(LIMITS, MOST_WORKERS, DWELL_S),
        startup_s,
    )  # fmt: skip
    run = simulate(iter(load), seconds, 1, 1, setting=setting)
    changes = [
        Wanted(round(it.at_s, 2), it.kind.value, it.after)
        for it in run.changes
        if it.at_s < seconds
    ]
    return Run(changes, run.felt, startup_s)


def compare(live: Run, simulated: Run) -> tuple[bool, float]:
    """Return whether each kind's numbers changed alike, and by how many seconds one change was
    apart at most."""
    apart_s, is_same = 0.0, True
    for kind in ("prefill", "decode"):
        one, other = ([it for it in run.changes if it.kind == kind] for run in (live, simulated))
        is_same &= [it.num for it in one] == [it.num for it in other]
        for before, after in zip(one, other, strict=False):
            apart_s = max(apart_s, abs(before.at_s - after.at_s))
    return is_same, apart_s if is_same else math.inf


def main() -> None:
    parser = arguments(__doc__, "two minutes, prints only")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rates, seconds = RATES, SECONDS
    if asked.quick:
        rates, seconds = ((0.0, 3.3), (40.0, 10.0)), 120.0
    load = list(asks(rates, seconds, asked.seed))
    about = {"step_s": STEP_S, "limits": LIMITS._asdict(), "dwell_s": DWELL_S}
    record = Record.of(__file__, asked, **about)
    live = asyncio.run(run_live(load, seconds))
    simulated = run_simulated(load, seconds, live.startup_s)
    for name, run in (("live", live), ("simulated", simulated)):
        kept = attained(run.felt)
        record.add(
            {"part": name, "attained": kept, "startup_s": run.startup_s, "changes": run.changes}
        )
        print(f"{name}: {len(run.felt)} requests, attained {kept:.4f}")
        for it in run.changes:
            print(f"  {it.at_s:6.1f} s  {it.kind} -> {it.num}")
    is_same, apart_s = compare(live, simulated)
    record.goal(GOAL, "live: numbers that changed otherwise than simulated", not is_same, "<=", 0)
    record.goal(GOAL, "live: a change is apart by at most, s", apart_s, "<=", 2 * LOOK_S)
    record.finish()


if __name__ == "__main__":
    main()
