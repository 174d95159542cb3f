"""``pdmesh plan map``: which numbers of prefill and decode workers attain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.cli.bench.view import limits_text
from services.cli.plan.explain import WhatIfFlag
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.sim_report import OutputFlag, draw_map
from services.cli.plan.simulate import Study, study
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, plain_table
from services.planner.core.mesh_text import MeshPart, MeshShape
from services.planner.mesh_run import MeshRun
from shared.errors import InvalidRequest


def map_(
    workers: int = 6,
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Show which numbers of prefill and decode workers attain, and what mixed ones do.

    All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.

    Parameters
    ----------
    workers
        Most workers of a mesh.
    """
    if not 2 <= workers <= 32:
        raise InvalidRequest("a map is of 2..32 workers")
    shapes = [
        MeshShape.of(MeshPart(num, "P"), MeshPart(other, "D" if num else "M"))
        for num in (*range(1, workers), 0)  # without prefill workers all are mixed
        for other in range(1, workers - num + 1)
    ]
    kind = Study(_show, rank=_rank, draw=_draw, num_reported=3)
    return study(kind, flags, shapes, output, what_if=what_if, as_json=as_json)


def _rank(run: MeshRun) -> tuple[bool, int, float]:
    """The fewest workers that attain; where none do, what attains most."""
    return not run.attains, run.shape.num_workers if run.attains else 0, -run.attained


def _draw(flags: SimFlags, runs: Sequence[MeshRun], folder: Path) -> None:
    title = f"attained at {flags.rate:g} requests/s of {flags.workload}"
    shares = {(it.shape.num_of("P"), it.shape.num_of("D")): it.attained for it in runs}
    draw_map(folder / "map.svg", title, {place: it for place, it in shares.items() if place[0]})


def _show(flags: SimFlags, ranked: Sequence[MeshRun]) -> None:
    console = plain_console()
    console.print(
        f"share within {limits_text(flags.slo)} of {flags.num_requests} requests of "
        f"{flags.workload} at {flags.rate:g}/s"
    )
    shares = {str(run.shape): f"{run.attained:.0%}" for run in ranked}
    most = max(run.shape.num_workers for run in ranked)
    nums = range(1, most)
    table = plain_table("", *(f"{num}P" for num in nums), "all mixed")
    for other in range(1, most + 1):
        mixed = shares.get(f"{other}M")
        row = (shares.get(f"{num}P+{other}D", "") for num in nums)
        table.add_row(f"{other}D", *row, mixed and f"{other}M {mixed}")
    console.print(table)
    # Of those that were simulated: Ctrl-C may have come before the others.
    best, told, goal = ranked[0], f"{len(ranked)} simulated", f"{flags.attainment:.0%}"
    if not best.attains:
        console.print(f"{told}, none attains {goal}; most attains {best.shape}")
        return
    console.print(f"{told}, fewest workers that attain {goal}: {best.shape}")
    if second := next((run for run in ranked[1:] if run.attains), None):
        console.print(f"runner-up: {second.shape} attains {second.attained:.1%}")
