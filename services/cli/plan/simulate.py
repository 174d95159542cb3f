"""``pdmesh plan simulate``, ``compare``: what requests would feel on meshes that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from services.cli.plan.explain import Explained, explain, lines, num_runs
from services.cli.plan.sim_flags import QS, SimFlags, latencies
from services.cli.plan.sim_report import begin_report, draw_lines, report_files
from services.cli.plan.view import (
    EXIT_INTERRUPTED,
    counted,
    interruptible,
    plain_console,
    progress,
    say_how_long,
    say_interrupted,
)
from services.cli.sources import JsonFlag
from services.cli.words import plain_table, print_json
from services.planner.core.mesh_text import MeshShape, read_mesh
from services.planner.mesh_run import MeshRun
from services.sim.open_loop import SimRequest
from shared.errors import InvalidRequest
from shared.runtime.service import EXIT_FAILED, EXIT_OK

_PLAIN: Final = Parameter(show_env_var=False, negative="")
_QUIET: Final = Parameter(show_env_var=False, negative="", show_default=False)

RATES: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Of the rate asked for: the points of the picture of attainment over rate."""

OutputFlag = Annotated[Path | None, _QUIET]
WhatIfFlag = Annotated[bool, Parameter(show_env_var=False)]


@interruptible
def simulate(
    mesh: Annotated[str, _PLAIN],
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    beside: Annotated[list[Path] | None, _QUIET] = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate a mesh: pdmesh's own cores (admission, routing, leases, schedulers, transfers) under
    a virtual clock, with a time model for what computes.

    Every frame of KV is an event, equal decode steps are one (--fidelity). The time model is affine
    in a step's tokens; its defaults are OPT-13B on one A100 by DistServe's profile.

    Parameters
    ----------
    mesh
        Workers: 3P+2D, with P (prefill), D (decode), M (mixed); 2P(tp2)+1D(h100,tp4).
    what_if
        Also find the highest rate that attains, what other rates, lengths and times would do, and
        whether as many workers in other roles would do better.
    output
        Folder for report.json, requests.csv and report.svg, as of pdmesh bench, and attainment.svg.
    beside
        Folders of pdmesh bench's or of earlier plans' reports, drawn into the same picture.
    """
    shape = read_mesh(mesh)
    flags.check()
    rows = begin_report(output, beside)
    units = [part.unit for part in shape.parts]
    impossible = flags.impossible(units)
    requests = flags.requests(units)
    num = num_runs(shape, has_runner_up=True) if what_if else 0
    _say_how_long(flags, [shape], requests, num, is_drawn=output is not None)
    with progress(f"{shape}, {flags.rate:g} requests/s", len(requests)) as on_progress:
        run = flags.run(shape, requests, on_progress=on_progress)
    found = Explained.of(run)
    is_whole = True
    if what_if:
        try:
            with progress("what if", num) as on_progress:
                explain(flags, run, found, one_more=counted(on_progress))
        except KeyboardInterrupt:
            is_whole = False
    facts = flags.facts(run) | {"impossible": impossible}
    if what_if:
        facts["what_if"] = found.facts()
    if output is not None:
        report_files(flags, [run], output, {"runs": [facts]}, rows)
        _draw_rates(flags, [run], output)
    code = EXIT_OK if run.is_served else EXIT_FAILED
    code = code if is_whole else EXIT_INTERRUPTED
    if as_json:
        print_json(facts)
        return code
    console = plain_console()
    console.print(
        f"{shape}, {flags.policy}: {run.num_requests} requests of {flags.workload} at "
        f"{flags.rate:g}/s, seed {flags.seed}"
    )
    table = plain_table("", *QS)
    for name, values in latencies(run.outcomes).items():
        table.add_row(name, *(_ms(value) for value in values.values()))
    console.print(table)
    console.print(
        f"attainment {run.attained or 0:.1%} of TTFT {flags.slo_ttft} and TPOT {flags.slo_tpot}; "
        f"{run.goodput:.2f} good requests/s a worker"
    )
    if run.errors:
        console.print(f"not served: {_errors(run)}")
    for line in (*lines(found, flags), *impossible):
        console.print(line, soft_wrap=True)
    _say_times(flags, [run])
    say_interrupted(is_whole=is_whole)
    return code


@interruptible
def compare(
    meshes: Annotated[list[str], _PLAIN],
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    beside: Annotated[list[Path] | None, _QUIET] = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate several meshes with the same requests, and say which serves most within the limits.

    All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.

    Parameters
    ----------
    meshes
        Such as 5M 3P+2D 4P+1D, with P (prefill), D (decode), M (mixed).
    what_if
        Also find the best one's highest rate, and what other rates, lengths and times would do.
    output
        Folder for report.json, requests.csv and report.svg, as of pdmesh bench, and attainment.svg.
    beside
        Folders of pdmesh bench's or of earlier plans' reports, drawn into the same picture.
    """
    shapes = list(dict.fromkeys(map(read_mesh, meshes)))
    if len(shapes) < 2:
        raise InvalidRequest("compare wants two meshes at least: 4M 2P+2D")
    flags.check()
    rows = begin_report(output, beside)
    units = [part.unit for shape in shapes for part in shape.parts]
    impossible = flags.impossible(units)
    requests = flags.requests(units)
    num = num_runs(shapes[0], has_runner_up=False) if what_if else 0
    _say_how_long(flags, shapes, requests, num, is_drawn=output is not None)
    runs: list[MeshRun] = []
    is_whole = True
    try:
        for shape in shapes:
            with progress(f"{shape}, {flags.rate:g} requests/s", len(requests)) as on_progress:
                runs.append(flags.run(shape, requests, on_progress=on_progress))
    except KeyboardInterrupt:
        is_whole = False
    ranked = sorted(
        runs, key=lambda run: (run.attained or 0.0, run.goodput, -_most_used(run)), reverse=True
    )
    found = Explained.of(ranked[0] if ranked else None)
    if what_if and is_whole:
        try:
            with progress(f"what if, of {ranked[0].shape}", num) as on_progress:
                step = counted(on_progress)
                explain(flags, ranked[0], found, has_runner_up=False, one_more=step)
        except KeyboardInterrupt:
            is_whole = False
    code = EXIT_OK if is_whole else EXIT_INTERRUPTED
    facts = [flags.facts(run) | {"impossible": impossible} for run in ranked]
    if output is not None and runs:
        report_files(flags, runs, output, {"runs": facts, "best": found.facts()}, rows)
        _draw_rates(flags, runs, output)
    if as_json:
        print_json(facts)
        return code
    console = plain_console()
    if not runs:
        console.print("no mesh was simulated to its end")
        return code
    console.print(
        f"{len(requests)} requests of {flags.workload} at {flags.rate:g}/s, {flags.policy}, seed "
        f"{flags.seed}; TTFT {flags.slo_ttft}, TPOT {flags.slo_tpot}"
    )
    head = ("mesh", "attained", "good/s a worker", "TTFT p50", "p99", "TPOT p50", "p99")
    table = plain_table(*head, "not served", left="mesh")
    for run in ranked:
        table.add_row(*_row(run))
    console.print(table)
    if len(ranked) > 1:
        console.print(_first_of(*ranked[:2]))
    for line in (*lines(found, flags), *impossible):
        console.print(line, soft_wrap=True)
    _say_times(flags, runs)
    say_interrupted(is_whole=is_whole)
    return code


def _say_how_long(
    flags: SimFlags,
    shapes: Sequence[MeshShape],
    requests: Sequence[SimRequest],
    num_more: int,
    *,
    is_drawn: bool,
) -> None:
    num = len(shapes) * (len(RATES) if is_drawn else 1) + num_more
    run_s = max(flags.trial_s(shape, requests) for shape in shapes)
    say_how_long(num, run_s, "--no-what-if leaves most of them out, --num-requests shortens each")


def _row(run: MeshRun) -> list[str]:
    felt = latencies(run.outcomes)
    shown = [
        _ms(felt[name][q]) if name in felt else "–"
        for name in ("TTFT", "TPOT")
        for q in ("p50", "p99")
    ]
    shares = (f"{run.attained or 0:.1%}", f"{run.goodput:.2f}")
    return [str(run.shape), *shares, *shown, _errors(run) or "–"]


def _most_used(run: MeshRun) -> float:
    """Return the share of the limit that is nearer to being missed."""
    return 0.0 if run.felt is None else max(run.felt.ttft_use, run.felt.tpot_use)


def _first_of(best: MeshRun, second: MeshRun) -> str:
    """Say which is the better one, and why."""
    if (best.attained or 0) > (second.attained or 0):
        return (
            f"{best.shape} attains most ({best.attained:.1%}), then {second.shape} "
            f"({second.attained:.1%})"
        )
    is_less = best.shape.num_workers < second.shape.num_workers
    why = "fewer workers" if is_less else "more room below its limits"
    return f"{best.shape} and {second.shape} attain the same; {best.shape} has {why}"


def _draw_rates(flags: SimFlags, runs: Sequence[MeshRun], folder: Path) -> None:
    """Attainment over rate, of each mesh."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for run in runs:
        points = found.setdefault(str(run.shape), [(run.rate, run.attained or 0.0, "")])
        for factor in RATES:
            if factor != 1:
                rate = flags.rate * factor
                points.append((rate, flags.variant(rate=rate).run(run.shape).attained or 0.0, ""))
    title = f"share within TTFT {flags.slo_ttft} and TPOT {flags.slo_tpot}"
    path = folder / "attainment.svg"
    draw_lines(path, title, ("requests/s", "attained"), found, goal=flags.attainment)


def _say_times(flags: SimFlags, runs: Sequence[MeshRun]) -> None:
    console = plain_console()
    for run in runs[:1]:
        for source in flags.sources(run.shape):
            console.print(f"times: {source}", soft_wrap=True)
    told: dict[str, Any] = {word: None for run in runs for word in flags.warnings(run.shape)}
    for word in told:
        console.print(word, soft_wrap=True)
    took_s = sum(run.took_s for run in runs)
    console.print(
        f"{flags.fidelity}: {sum(run.num_events for run in runs):,} events in {took_s:.1f} s, "
        f"{sum(run.num_requests for run in runs) / took_s:,.0f} requests simulated a second"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _errors(run: MeshRun) -> str:
    return ", ".join(f"{num} {name}" for name, num in run.errors.items())
