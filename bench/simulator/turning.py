"""Where does disaggregation begin to pay on GPUs? Simulated, from published times of steps.

    python -m bench.simulator.turning --data DIR [--quick] [--requests 600]

Four workers apart, in every split, beside four colocated ones with several token budgets: the
highest rate at which 90 % of the requests keep both limits, for several limits of TPOT. What the
numbers mean: README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.record import Record, arguments
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.times_flags import TimesFlags, TimesName
from services.planner.core.mesh_text import read_mesh
from shared.telemetry.definitions import RequestOutcome, Slo, attainment, percentile

NUM: Final = 4
TARGET: Final = 0.9
LIMITS: Final = (1.15, 1.3, 1.5, 2.0, 3.0, 5.0)
"""Of TPOT, in medians of a request alone."""

TTFT_TIMES: Final = 5.0
"""Limit of TTFT: so many times the 90th percentile of a request alone."""

BUDGETS: Final = (256, 512, 2048)
"""Tokens of a colocated worker's step; the best counts."""

SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Rates that are asked, in what colocated workers can do at most for ever, by closed form; a mesh
is not asked for more than its own."""


class Shape(NamedTuple):
    """One worker: whose times, and of which model."""

    name: str
    times: TimesName
    model: str
    device: str | None


MACHINE_KV: Final = 1_000_000
"""Tokens of KV beside Llama2-70B's weights on eight devices of 80 GB; of OPT-13B it is in
DistServe's files."""

SHAPES: Final = {
    "opt-13b": Shape("OPT-13B, an A100 (DistServe's fits)", "distserve", "opt-13b", None),
    "a100": Shape("Llama2-70B, 8 A100 (Splitwise's)", "splitwise", "llama-2-70b", "a100-80gb"),
    "h100": Shape("Llama2-70B, 8 H100 (Splitwise's)", "splitwise", "llama-2-70b", "h100-80gb"),
}
WORKLOADS: Final = ("azure-conv", "azure-code")


class Tried(NamedTuple):
    """One mesh at one rate."""

    mesh: str
    budget: int
    rate: float
    outcomes: Sequence[RequestOutcome]


def run(flags: SimFlags, mesh: str) -> Sequence[RequestOutcome]:
    """Return what every request felt."""
    return flags.run(read_mesh(mesh)).answers


def try_all(flags: SimFlags, ttft_s: float, slowest_s: float) -> list[Tried]:
    """Return every mesh at rising rates, until most miss the loosest limits."""
    most = flags.most_rate(read_mesh(f"{NUM}M"))  # of full batches and steps without chunks
    meshes = [(f"{num}P+{NUM - num}D", 0) for num in range(1, NUM)]
    found: list[Tried] = []
    for mesh, budget in [*meshes, *((f"{NUM}M", budget) for budget in BUDGETS)]:
        for share in SHARES:
            rate = share * most
            if rate > flags.most_rate(read_mesh(mesh)):
                break
            outcomes = run(flags.variant(rate=rate, token_budget=budget), mesh)
            found.append(Tried(mesh, budget, rate, outcomes))
            if attainment(outcomes, Slo(ttft_s, slowest_s)) < TARGET:
                break
    return found


def best(tried: list[Tried], slo: Slo, *, apart: bool) -> Tried | None:
    """Return the highest rate at which the target is reached, and by whom; None = by nobody."""
    kept = [
        it for it in tried if ("P" in it.mesh) is apart and attainment(it.outcomes, slo) >= TARGET
    ]
    return max(kept, key=lambda it: it.rate, default=None)


def rows_of(shape: str, workload: str, requests: int, data: Path) -> list[dict[str, Any]]:
    """Return one row for each limit of TPOT."""
    its = SHAPES[shape]
    times = TimesFlags(
        times=its.times,
        data=data,
        model=its.model,
        device=its.device,
        kv_tokens=MACHINE_KV if its.times == "splitwise" else None,
    )
    flags = SimFlags(
        workload=workload,
        num_requests=requests,
        policy="least_loaded",
        block_size=256,
        times=times,
    )
    alone = run(flags.variant(rate=0.01, num_requests=60), "1P+1D")
    ttft_s = TTFT_TIMES * percentile([it.ttft_s or 0.0 for it in alone], 90)
    median_s = percentile([it.tpot_s for it in alone], 50)
    tried = try_all(flags, ttft_s, max(LIMITS) * median_s)
    rows: list[dict[str, Any]] = []
    for limit in LIMITS:
        slo = Slo(ttft_s, limit * median_s)
        apart, together = (best(tried, slo, apart=is_it) for is_it in (True, False))
        row: dict[str, Any] = {
            "shape": shape,
            "workload": workload,
            "ttft_s": ttft_s,
            "tpot_s": slo.tpot_s,
            "limit": limit,
            "apart": None if apart is None else [apart.mesh, apart.rate],
            "together": None if together is None else [together.budget, together.rate],
        }
        rows.append(row)
        ours = "-" if apart is None else f"{apart.rate:.1f}/s ({apart.mesh})"
        theirs = "-" if together is None else f"{together.rate:.1f}/s (budget {together.budget})"
        ratio = "" if None in (apart, together) else f"  {apart.rate / together.rate:.2f} x"  # type: ignore[union-attr]
        print(
            f"{its.name}, {workload}: TTFT {ttft_s:.2f} s, TPOT {slo.tpot_s * 1e3:.0f} ms "
            f"({limit:g} x): apart {ours}, together {theirs}{ratio}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = arguments(__doc__, "one shape, few requests, prints only")
    parser.add_argument(
        "--data", type=Path, required=True, help="DistServe's and Splitwise's files"
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    asked = parser.parse_args()
    workloads = WORKLOADS
    if asked.quick:
        asked.shapes, asked.requests, workloads = ["h100"], 60, WORKLOADS[:1]
    record = Record.of(__file__, asked, modelled=True)
    for shape in asked.shapes:
        for workload in workloads:
            for row in rows_of(shape, workload, asked.requests, asked.data):
                record.add(row)
    record.finish()


if __name__ == "__main__":
    main()
