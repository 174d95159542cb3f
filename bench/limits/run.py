"""Under which limits do prefill and decode apart serve more than workers that do both?

    python -m bench.limits.run [--quick] [--loads azure-conv mooncake] [--rates 0.75 1.25 2.5]

Every rate is asked of all at the same two cores; the time to the first token and the time per token
of each answer are kept, and afterwards held against many pairs of limits. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from bench.disaggregation.run import (
    DISAGGREGATED,
    LOADS,
    MOST_VOID,
    NEVER,
    TARGET,
    add_our_systems,
    colocated_systems,
    make_model,
    open_ours,
    report,
    run_client,
    send,
    shares_prefixes,
)
from bench.plots import Panel, Pictures
from bench.record import Record, arguments, grouped, spread
from services.cli.bench.endpoints import ServerEndpoint
from services.cli.bench.records import Ending, Run
from services.cli.bench.sources import Source
from services.cli.bench.summary import summarize
from services.cli.bench.workload import Load
from shared.telemetry.definitions import goodput

TTFT_LIMITS = (3, 5, 10, 20)
"""As multiples of the best median without load."""

TPOT_LIMITS = (1.1, 1.25, 1.5, 2, 3, 5)

Row = Mapping[str, Any]


def goodput_of(rows: Sequence[Row], system: str, ttft: float, tpot: float) -> float:
    """Return the highest rate that was asked for at which ``TARGET`` of all answers, of all
    repetitions together, kept limits of so many times the best medians without load.

    rows: one load's; runs in which the client fell behind do not count.
    """
    kept: defaultdict[float, list[bool]] = defaultdict(list)
    unloaded = {row["repetition"]: row["unloaded"] for row in rows if "unloaded" in row}
    for row in rows:
        if row.get("system") != system or row["void"]:
            continue
        alone = unloaded[row["repetition"]].values()
        ttft_s = ttft * min(one["ttft_s"] for one in alone)
        tpot_s = tpot * min(one["tpot_s"] for one in alone)
        kept[row["rate"]] += [
            answer is not None and answer[0] <= ttft_s and answer[1] <= tpot_s
            for answer in row["answers"]
        ]
    shares = [(rate, sum(flags) / len(flags)) for rate, flags in kept.items() if flags]
    return goodput(shares, target=TARGET)


def answers_of(run: Run) -> list[tuple[float, float] | None]:
    """TTFT and time per token of every request, in seconds; None for one without a whole
    answer."""
    outcomes = [one.outcome() for one in run.records if one.end is not Ending.UNFINISHED]
    return [
        (round(ttft_s, 5), round(one.tpot_s, 6))
        if one.is_complete and (ttft_s := one.ttft_s) is not None
        else None
        for one in outcomes
    ]


def show(load: str, rows: Sequence[Row]) -> None:
    """Print everybody's goodput for every pair of limits."""
    systems = list(grouped(rows, "system"))
    print(f"\n{load}: requests/s, {' / '.join(systems)}; limits x unloaded medians")
    print(f"{'TTFT':>6} |" + "".join(f"{f'TPOT {tpot:g}':>20}" for tpot in TPOT_LIMITS))
    for ttft in TTFT_LIMITS:
        cells = [
            " / ".join(f"{goodput_of(rows, system, ttft, tpot):g}" for system in systems)
            for tpot in TPOT_LIMITS
        ]
        print(f"{ttft:6g} |" + "".join(f"{cell:>20}" for cell in cells))


async def ask(
    title: str,
    name: str,
    endpoints: Sequence[ServerEndpoint],
    source: Source,
    load: Load,
    seed: Iterator[int],
) -> tuple[Run, list[str]]:
    """Send one workload, and once or twice more if the client fell behind; what made the last run
    void comes with it."""
    for attempt in count():
        run = await send(endpoints, source, load, next(seed))
        found = summarize(run, NEVER)
        report(title, name, found)
        if not found["void"] or attempt == MOST_VOID:
            return run, found["void"]
    raise AssertionError


async def measure(
    record: Record,
    load: str,
    systems: Mapping[str, Sequence[ServerEndpoint]],
    asked: argparse.Namespace,
) -> None:
    """All rates in turn, each asked of all; unloaded medians first, in every repetition."""
    source, seed = LOADS[load], iter(range(1, 1 << 30))
    first = Load(rate=2.0, num_requests=6, arrivals="poisson")
    unloaded = Load(rate=0.5, num_requests=asked.unloaded, burstiness=math.inf, arrivals="poisson")
    for endpoints in systems.values():
        await send(endpoints, source, first, next(seed))
    for repetition in range(asked.repetitions):
        about = {"load": load, "repetition": repetition}
        alone: dict[str, dict[str, float]] = {}
        turns = [*systems.items()][:: -1 if repetition % 2 else 1]
        for name, endpoints in turns:
            found = summarize(await send(endpoints, source, unloaded, next(seed)), NEVER)
            report(f"{load}, unloaded", name, found)
            alone[name] = {key: found[key]["p50"] for key in ("ttft_s", "tpot_s")}
        record.rows.append({**about, "unloaded": alone})
        for rate in asked.rates:
            arrivals = Load(
                rate=rate,
                duration_s=max(asked.seconds, asked.least / rate),
                arrivals="poisson",
                seed=asked.seed + repetition,
            )
            for name, endpoints in turns:
                run, void = await ask(
                    f"{load}, {repetition}", name, endpoints, source, arrivals, seed
                )
                row = {"system": name, "rate": rate, "void": void}
                record.add({**about, **row, "answers": answers_of(run)})


async def main(asked: argparse.Namespace) -> None:
    record = Record.of(__file__, asked, realtime=asked.realtime)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        for load in asked.loads:
            async with contextlib.AsyncExitStack() as stack:
                colocated = colocated_systems(asked.colocated)
                systems = {
                    name: await open_ours(
                        stack, folder, asked, one,
                        is_split=one is not None and one.num_workers > 1 and shares_prefixes(load),
                    )
                    for name, one in {DISAGGREGATED: None, **colocated}.items()
                }  # fmt: skip
                await measure(record, load, systems, asked)
            show(load, grouped(record.rows, "load")[load])
    record.finish(pictures_of)


def pictures_of(rows: Sequence[Row]) -> Pictures:
    """Goodput over the limit of the time per token, a picture for each load, a plot for each limit
    of TTFT."""
    pictures: dict[str, list[Panel]] = {}
    for load, of in grouped(rows, "load").items():
        for ttft in TTFT_LIMITS:
            lines = {
                name: [(tpot, spread([goodput_of(of, name, ttft, tpot)])) for tpot in TPOT_LIMITS]
                for name in grouped(of, "system")
            }
            title = f"{load}, TTFT within {ttft} x unloaded (CPU)"
            panel = Panel(title, "limit of TPOT, x unloaded", "goodput, requests/s", lines)
            pictures.setdefault(f"-{load}", []).append(panel)
    return pictures


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "two rates, seconds each, not written")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.75, 1.25, 1.75, 2.5, 3.5], help="requests/s"
    )
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=25.0, help="length of a run, at least")
    parser.add_argument("--least", type=int, default=40, help="requests of a run, at least")
    parser.add_argument("--unloaded", type=int, default=20, help="requests of the unloaded run")
    add_our_systems(parser)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.quick:
        asked.loads, asked.rates, asked.repetitions = asked.loads[:1], [1.0, 2.0], 1
        asked.seconds, asked.least, asked.unloaded = 4.0, 2, 4
    return asked


if __name__ == "__main__":
    run_client(main(parse()))
