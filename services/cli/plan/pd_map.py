"""``pdmesh plan map``: which numbers of prefill and decode workers attain."""

from __future__ import annotations

from dataclasses import asdict

from services.cli.bench.view import limits_text
from services.cli.plan.explain import Explained, WhatIfFlag, explain, lines, num_runs
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.sim_report import OutputFlag, begin_report, draw_map, report_files
from services.cli.plan.view import Kept, progress, say_how_long
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, plain_table, print_json, print_lines
from services.planner.core.limits import binding_limit
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit
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
    flags.check()
    begin_report(output)
    impossible = flags.impossible([Unit()])
    requests = flags.requests([Unit()])
    # By numbers of prefill and decode workers; without prefill workers all are mixed.
    shapes = {
        (num, other): MeshShape.of(MeshPart(num, "P"), MeshPart(other, "D" if num else "M"))
        for num in (*range(1, workers), 0)
        for other in range(1, workers - num + 1)
    }
    run_s = flags.trial_s(shapes[1, 1], requests)
    num_more = num_runs(shapes[0, 1]) if what_if else 0
    say_how_long(len(shapes) + num_more, run_s, "fewer workers or --num-requests shorten it")
    cells: dict[tuple[int, int], MeshRun] = {}
    kept = Kept()
    with kept, progress("P:D map", len(shapes)) as one_more:
        for place, shape in shapes.items():
            cells[place] = flags.run(shape, requests)
            one_more()
    runs = list(cells.values())
    ranked = sorted(runs, key=lambda run: (not run.attains, run.shape.num_workers, -run.attained))
    good = [run for run in ranked if run.attains]
    least, second = (*good, None, None)[:2]
    found = Explained(least and binding_limit(least.felt))
    if what_if and kept.is_whole and least is not None:
        with kept:
            explain(flags, least, found)
    if second is not None:
        found.runner_up = str(second.shape), second.attained
    facts = {
        "cells": [
            {"prefill": num, "decode": other, "attainment": run.attained}
            for (num, other), run in cells.items()
            if num
        ],
        "mixed": [
            {"mixed": other, "attainment": run.attained}
            for (num, other), run in cells.items()
            if not num
        ],
        "fewest": None if least is None else str(least.shape),
        "what_if": asdict(found),
        "impossible": impossible,
        "limits": {str(run.shape): asdict(run.felt) for run in runs},
        "is_whole": kept.is_whole,
    }
    if output is not None and runs:
        report_files(flags, ranked[:3], output, facts)
        title = f"attained at {flags.rate:g} requests/s of {flags.workload}"
        shares = {place: run.attained for place, run in cells.items() if place[0]}
        draw_map(output / "map.svg", title, shares)
    if as_json:
        print_json(facts)
        return kept.exit_code()
    console = plain_console()
    console.print(
        f"share within {limits_text(flags.slo)} of {len(requests)} requests of {flags.workload} at "
        f"{flags.rate:g}/s"
    )
    table = plain_table("", *(f"{num}P" for num in range(1, workers)), "all mixed")
    for other in range(1, workers + 1):
        *row, mixed = (_share(cells.get((num, other))) for num in (*range(1, workers), 0))
        table.add_row(f"{other}D", *row, mixed and f"{other}M {mixed}")
    console.print(table)
    so_far = "" if len(runs) == len(shapes) else " so far"
    if least is not None:
        console.print(f"fewest workers that attain {flags.attainment:.0%}{so_far}: {least.shape}")
        print_lines(lines(found, flags))
    else:
        console.print(
            f"no mesh of at most {workers} workers attains {flags.attainment:.0%}{so_far}"
        )
    print_lines(impossible)
    return kept.exit_code()


def _share(run: MeshRun | None) -> str:
    return "" if run is None else f"{run.attained:.0%}"
