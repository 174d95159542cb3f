"""Where the long gaps between tokens come from: a limit of row 9, seen from the client.

    python -m bench.disaggregation.gaps [--rates 1.0 1.5] [--seconds 60] [--load azure-conv]

One prefill and one decode worker, first unloaded as in ``run.py``, then at each rate. Every gap
between messages is put into one class: token 1 to token 2 is the hand-over; a later gap may have a
hand-over of another answer in it, or a prompt being computed, or neither. Prints a table a run,
writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.disaggregation.run import LOADS, make_model, our_mesh, run_client, send
from services.cli.bench.endpoints import open_endpoints
from services.cli.bench.records import Ending, Record
from services.cli.bench.workload import Load
from shared.telemetry.definitions import percentile

HAND_OVER = "token 1 to 2"
JOINED = "later, another answer's token 1 or 2 in it"
BESIDE = "later, a prompt on its way"
ALONE = "later, neither"
CLASSES = (HAND_OVER, JOINED, BESIDE, ALONE)


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two messages of one answer. num_rows: answers between token 1 and their end."""

    seconds: float
    kind: str
    num_rows: int


def gaps_of(records: Sequence[Record]) -> list[Gap]:
    """Put every gap of complete answers into its class.

    A first message of more than one token has the hand-over behind it.
    """
    answers = [record for record in records if record.end is Ending.COMPLETE]
    gaps: list[Gap] = []
    for one in answers:
        others = [other for other in answers if other is not one]
        for index, (begin, end) in enumerate(zip(one.times, one.times[1:], strict=False)):
            joins = any(begin < at <= end for other in others for at in other.times[:2])
            waits = any(other.due_at < end and other.times[0] > begin for other in others)
            rows = sum(other.times[0] <= begin < other.times[-1] for other in others)
            later = JOINED if joins else BESIDE if waits else ALONE
            is_first = index == 0 and one.counts[0] == 1
            gaps.append(Gap(end - begin, HAND_OVER if is_first else later, 1 + rows))
    return gaps


def show(title: str, gaps: Sequence[Gap]) -> None:
    """Print how long the gaps of each class are, and how many of the longest hundredth it has."""
    if not gaps:
        print(f"\n{title}: no answer of two messages")
        return
    seconds = [gap.seconds for gap in gaps]
    bound_s = percentile(seconds, 99)
    longest = [gap for gap in gaps if gap.seconds > bound_s]
    print(
        f"\n{title}: {len(gaps)} gaps, p50 {percentile(seconds, 50) * 1e3:.1f} ms, "
        f"p99 {bound_s * 1e3:.1f} ms"
    )
    print(f"{'':44} {'of all':>7} {'p50':>6} {'p90':>6} {'p99':>6} {'of the longest 1 %':>19}")
    for kind in (*CLASSES, *sorted({gap.num_rows for gap in gaps})):
        of = [gap.seconds for gap in gaps if kind in (gap.kind, gap.num_rows)]
        if not of:
            continue
        found = " ".join(f"{percentile(of, q) * 1e3:6.1f}" for q in (50, 90, 99))
        share = sum(kind in (gap.kind, gap.num_rows) for gap in longest) / max(1, len(longest))
        name = f"{kind} running" if isinstance(kind, int) else kind
        print(f"{name:44} {len(of) / len(gaps):7.1%} {found} {share:19.0%}", flush=True)


async def main(asked: argparse.Namespace) -> None:
    source = LOADS[asked.load]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder)
        num_colocated = 2 if asked.colocated else 0
        ours = our_mesh(folder, num_colocated=num_colocated, tbt_s=0.015, realtime=asked.realtime)
        mesh = await stack.enter_async_context(ours)
        endpoints = await stack.enter_async_context(open_endpoints([mesh.http_url]))
        warm = Load(rate=2.0, num_requests=6, arrivals="poisson")
        await send(endpoints, source, warm, 1)
        alone = Load(rate=0.5, num_requests=25, burstiness=math.inf, arrivals="poisson")
        run = await send(endpoints, source, alone, 2)
        show(f"{asked.load}, unloaded", gaps_of(run.records))
        for seed, rate in enumerate(asked.rates, 3):
            load = Load(rate=rate, duration_s=asked.seconds, arrivals="poisson", seed=asked.seed)
            run = await send(endpoints, source, load, seed)
            show(f"{asked.load}, {rate:g} requests/s", gaps_of(run.records))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--load", choices=list(LOADS), default="azure-conv")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 1.5], help="requests/s")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--colocated", action="store_true", help="two colocated workers instead")
    parser.add_argument("--realtime", action="store_true", help="see run.py")
    return parser.parse_args()


if __name__ == "__main__":
    run_client(main(parse()))
