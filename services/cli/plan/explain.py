"""What a plan says beside its figures: what binds, the next best, headroom, and what if the load or
the time model is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

from cyclopts import Parameter

from services.cli.bench.search import RateSearch
from services.cli.plan.sim_flags import MOST_REQUESTS, SimFlags
from services.cli.plan.view import progress
from services.planner.core.fleet import neighbours
from services.planner.core.limits import Limit
from services.planner.core.mesh_text import MeshShape
from services.planner.mesh_run import MeshRun

TOLERANCE: Final = 0.05
MOST_RUNS: Final = 12
"""Of a search for the rate that still attains."""

WhatIfFlag = Annotated[
    bool,
    Parameter(
        help="Also find the highest rate of the mesh that is told of, what other rates, lengths "
        "and times would do, and of one mesh, whether as many workers in other roles do better."
    ),
]

VARIANTS: Final = {
    "rate -20 %": ("rate", 0.8),
    "rate +20 %": ("rate", 1.2),
    "lengths -20 %": ("scale_lengths", 0.8),
    "lengths +20 %": ("scale_lengths", 1.2),
    "times -20 %": ("slower", 0.8),
    "times +20 %": ("slower", 1.2),
}

LONGER: Final = 4
"""A run of so many times the requests: queues that grow slowly show in it."""

NUM_SEEDS: Final = 2
"""Other draws of the same load: how much of the answer is chance."""


@dataclass(slots=True)
class Explained:
    """What has been found out of one mesh so far. headroom: highest rate that attains, over the one
    asked for; None = not looked for. sensitivity: attained share by what is different. misses: what
    of that is the very load that is said to attain, drawn otherwise or for longer, and misses."""

    limit: Limit | None = None
    headroom: float | None = None
    most_rate: float | None = None
    sensitivity: dict[str, float] = field(default_factory=dict[str, float])
    misses: list[str] = field(default_factory=list[str])
    runner_up: tuple[str, float] | None = None


def num_runs(shape: MeshShape, *, has_runner_up: bool = False) -> int:
    """Return how many simulations ``explain`` takes at most."""
    others = len(neighbours(shape)) if has_runner_up else 0
    # The longer run takes as long as so many.
    return len(VARIANTS) + NUM_SEEDS + LONGER + MOST_RUNS + others


def explain(
    flags: SimFlags, run: MeshRun, found: Explained, *, has_runner_up: bool = False
) -> None:
    """Find out more of a mesh, and fill it in as it is found; Ctrl-C leaves what is there."""
    shape = run.shape
    others = _drawn_otherwise(flags, shape)
    variants = {
        name: {key: factor if key == "slower" else getattr(flags, key) * factor}
        for name, (key, factor) in VARIANTS.items()
    }
    num = num_runs(shape, has_runner_up=has_runner_up)
    with progress(f"what if, of {shape}", num) as one_more:
        for name, changes in (variants | others).items():
            found.sensitivity[name] = flags.variant(**changes).run(shape).attained
            one_more()
        found.most_rate = goodput(flags, shape, flags.rate, one_more=one_more)
        found.headroom = found.most_rate / flags.rate
        if run.attains:
            found.misses = [name for name in others if found.sensitivity[name] < flags.attainment]
            if found.headroom < 1:  # more than the bound: no queue is long enough yet
                found.misses.append("requests without end")
        if has_runner_up:
            requests = flags.requests([part.unit for part in shape.parts])
            for other in neighbours(shape):
                share = flags.run(other, requests).attained
                if found.runner_up is None or share > found.runner_up[1]:
                    found.runner_up = str(other), share
                one_more()


def _drawn_otherwise(flags: SimFlags, shape: MeshShape) -> dict[str, dict[str, int]]:
    """Return the same load by other draws and for longer. Of a trace file nothing is drawn, and it
    may hold no more: what would be the same run again tells nothing."""
    units = [part.unit for part in shape.parts]
    own = flags.workload_of(units).asks
    seeds = range(flags.seed + 1, flags.seed + NUM_SEEDS + 1)
    others = {
        f"seed {seed}": {"seed": seed}
        for seed in seeds
        if flags.variant(seed=seed).workload_of(units).asks != own
    }
    num = LONGER * flags.num_requests
    if num <= MOST_REQUESTS:
        longer = {"num_requests": num}
        found = len(flags.variant(**longer).workload_of(units).asks)
        if found > len(own):
            name = f"{LONGER} x the requests" if found == num else f"all {found} requests"
            others[name] = longer
    return others


def goodput(
    flags: SimFlags,
    shape: MeshShape,
    first: float,
    *,
    above: float = 0.0,
    one_more: Callable[[], None] = lambda: None,
) -> float:
    """Return the highest rate that attains, by bisection with the same draws at every rate; 0 if
    none is above ``above``. A rate that the mesh cannot sustain does not attain, though a run may
    be too short to show it."""
    bound = flags.most_rate(shape)
    # Rates up to ``above`` tell nothing that is asked for, and beyond the bound all miss.
    first = min(bound, max(first, above * (1 + TOLERANCE)))
    search = RateSearch(first, flags.attainment, TOLERANCE, MOST_RUNS)
    while (rate := search.next_rate()) is not None:
        if rate <= above:
            return 0.0
        is_good = rate <= bound and flags.variant(rate=rate).run(shape).attains
        search.add(rate, float(is_good))
        one_more()
    return search.best


def lines(found: Explained, flags: SimFlags) -> list[str]:
    said: list[str] = []
    if found.limit is not None:
        said.append(f"binds: {found.limit.why}")
    if found.most_rate is not None and found.headroom is not None:
        said.append(
            f"headroom: {flags.attainment:.0%} attain up to {found.most_rate:.3g} requests/s "
            f"({found.headroom:.2f} x the rate asked for)"
            if found.most_rate
            else f"headroom: none, at no rate {flags.attainment:.0%} attain"
        )
    if found.sensitivity:
        shares = (f"{name} {share:.1%}" for name, share in found.sensitivity.items())
        said.append(f"attainment if: {', '.join(shares)}")
    if found.misses:
        said.append(
            f"NOT SAFE: the same load misses the target with {', '.join(found.misses)}: plan for a "
            f"lower rate, or with --num-requests {min(MOST_REQUESTS, LONGER * flags.num_requests)}"
        )
    if found.runner_up is not None:
        name, share = found.runner_up
        said.append(f"runner-up: {name} attains {share:.1%}")
    return said
