"""``pdmesh plan map``: which numbers of prefill and decode workers attain."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from services.cli.plan.explain import Explained, explain, lines, num_runs
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.sim_report import begin_report, draw_map, report_files
from services.cli.plan.view import Kept, progress, say_how_long
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, plain_table, print_json, print_lines
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit
from services.planner.mesh_run import MeshRun
from shared.errors import InvalidRequest


def pd_map(
    workers: int = 6,
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: bool = True,
    output: Path | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Show which numbers of prefill and decode workers attain, and what mixed ones do.

    All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.

    Parameters
    ----------
    workers
        Most workers of a mesh.
    what_if
        Also find the highest rate of the fewest that attain, and what other rates, lengths and
        times would do.
    output
        Folder for report.json, requests.csv, report.svg and map.svg.
    """
    if not 2 <= workers <= 32:
        raise InvalidRequest("a map is of 2..32 workers")
    flags.check()
    begin_report(output)
    impossible = flags.impossible([Unit()])
    requests = flags.requests([Unit()])
    cells: dict[tuple[int, int], MeshRun] = {}
    mixed: list[MeshRun] = []
    places = [
        (num_prefill, other)
        for num_prefill in range(1, workers)
        for other in range(1, workers - num_prefill + 1)
    ]
    run_s = flags.trial_s(MeshShape.of(MeshPart(1, "P"), MeshPart(1, "D")), requests)
    num = len(places) + workers
    num_more = num_runs(MeshShape.of(MeshPart(1, "M"))) if what_if else 0
    say_how_long(num + num_more, run_s, "fewer workers or --num-requests shorten it")
    kept = Kept()
    with kept, progress("P:D map", num) as one_more:
        for num_prefill, other in places:
            shape = MeshShape.of(MeshPart(num_prefill, "P"), MeshPart(other, "D"))
            cells[num_prefill, other] = flags.run(shape, requests)
            one_more()
        for num_mixed in range(1, workers + 1):
            mixed.append(flags.run(MeshShape.of(MeshPart(num_mixed, "M")), requests))
            one_more()
    runs = [*cells.values(), *mixed]
    ranked = sorted(
        runs, key=lambda run: (not run.attains, run.shape.num_workers, -(run.attained or 0.0))
    )
    good = [run for run in ranked if run.attains]
    least, second = (*good, None, None)[:2]
    found = Explained.of(least)
    if what_if and kept.is_whole and least is not None:
        with kept:
            explain(flags, least, found)
    if second is not None:
        found.runner_up = str(second.shape), second.attained or 0.0
    facts = {
        "cells": [
            {"prefill": num, "decode": other, "attainment": run.attained}
            for (num, other), run in cells.items()
        ],
        "mixed": [{"mixed": run.shape.num_workers, "attainment": run.attained} for run in mixed],
        "fewest": None if least is None else str(least.shape),
        "what_if": asdict(found),
        "impossible": impossible,
        "limits": {str(run.shape): asdict(run.felt) for run in runs if run.felt is not None},
        "is_whole": kept.is_whole,
    }
    if output is not None and runs:
        report_files(flags, ranked[:3], output, facts)
        title = f"attained at {flags.rate:g} requests/s of {flags.workload}"
        if cells:
            shares = {place: run.attained or 0.0 for place, run in cells.items()}
            draw_map(output / "map.svg", title, shares)
    if as_json:
        print_json(facts)
        return kept.exit_code()
    console = plain_console()
    console.print(
        f"share within TTFT {flags.slo_ttft} and TPOT {flags.slo_tpot} of {len(requests)} requests "
        f"of {flags.workload} at {flags.rate:g}/s"
    )
    table = plain_table("", *(f"{num}P" for num in range(1, workers)), "all mixed")
    shown = {run.shape.num_workers: run for run in mixed}
    for other in range(1, workers + 1):
        row = [_share(cells.get((num, other))) for num in range(1, workers)]
        mix = shown.get(other)
        table.add_row(f"{other}D", *row, f"{other}M {_share(mix)}" if mix else "")
    console.print(table)
    so_far = "" if len(runs) == num else " so far"
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
    return "" if run is None else f"{run.attained or 0:.0%}"
