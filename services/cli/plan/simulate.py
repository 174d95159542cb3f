"""``pdmesh plan simulate``, ``compare``, ``map``: what requests would feel on meshes that are not
there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from services.cli.bench.view import limits_text
from services.cli.plan.explain import Explained, WhatIfFlag, explain, lines, num_runs
from services.cli.plan.sim_flags import QS, SimFlags, latencies
from services.cli.plan.sim_report import (
    OutputFlag,
    begin_report,
    draw_lines,
    draw_map,
    report_files,
)
from services.cli.plan.tier_flags import cached_line
from services.cli.plan.view import Kept, progress, say_how_long
from services.cli.sources import OUTPUT, QUIET, JsonFlag
from services.cli.words import plain_console, plain_table, print_json, print_lines
from services.planner.core.limits import binding_limit
from services.planner.core.mesh_text import MeshPart, MeshShape, read_mesh
from services.planner.mesh_run import MeshRun
from shared.errors import InvalidRequest

RATES: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Of the rate asked for: the points of the picture of attainment over rate."""

BesideFlag = Annotated[
    list[Path] | None,
    QUIET,
    Parameter(
        group=OUTPUT,
        help="Folders of earlier reports, also of pdmesh bench: drawn into the picture.",
    ),
]


def simulate(
    mesh: str,
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    beside: BesideFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate a mesh: pdmesh's own cores (admission, routing, leases, schedulers, transfers) under
    a virtual clock, with a time model for what computes.

    Every frame of KV is an event, equal decode steps are one (--fidelity). The time model is affine
    in a step's tokens; its defaults are OPT-13B on one A100 by DistServe's profile.

    Parameters
    ----------
    mesh
        Workers: 3P+2D, with P (prefill), D (decode), M (mixed); 2P(tp2,pp2)+1D(h100,tp4).
    """
    shapes, kind = [read_mesh(mesh)], Study(_show_one, is_one=True)
    return study(kind, flags, shapes, output, beside, what_if=what_if, as_json=as_json)


def compare(
    meshes: list[str],
    /,
    *,
    flags: SimFlags = SimFlags(),  # noqa: B008  (frozen)
    what_if: WhatIfFlag = True,
    output: OutputFlag = None,
    beside: BesideFlag = None,
    as_json: JsonFlag = False,
) -> int:
    """Simulate several meshes with the same requests, and say which serves most within the limits.

    All meshes see the same arrivals and lengths. Ctrl-C shows what has been found.

    Parameters
    ----------
    meshes
        Such as 5M 3P+2D 4P+1D, with P (prefill), D (decode), M (mixed).
    """
    shapes = list(dict.fromkeys(map(read_mesh, meshes)))
    if len(shapes) < 2:
        raise InvalidRequest("compare wants two meshes at least: 4M 2P+2D")
    return study(Study(_show_all), flags, shapes, output, beside, what_if=what_if, as_json=as_json)


def _rank(run: MeshRun) -> Any:
    return -run.attained, -run.goodput, max(run.felt.ttft_use, run.felt.tpot_use)


@dataclass(frozen=True, slots=True)
class Study:
    """What sets one study of meshes apart. show: prints the runs, the best first. is_one: it is
    about one mesh, and which others of as many workers would do better. rank: the best has the
    least. draw: makes the picture of its own; None = attainment over rate. num_reported: of the
    best, whose requests are reported."""

    show: Callable[[SimFlags, Sequence[MeshRun]], None]
    is_one: bool = False
    rank: Callable[[MeshRun], Any] = _rank
    draw: Callable[[SimFlags, Sequence[MeshRun], Path], None] | None = None
    num_reported: int | None = None


def study(
    kind: Study,
    flags: SimFlags,
    shapes: Sequence[MeshShape],
    output: Path | None,
    beside: Sequence[Path] | None = None,
    *,
    what_if: bool,
    as_json: bool,
) -> int:
    """Simulate meshes, find out more of the best, and tell of all."""
    flags.check()
    rows = begin_report(output, beside)
    units = list(dict.fromkeys(part.unit for shape in shapes for part in shape.parts))
    impossible = flags.impossible(units)
    requests = flags.requests_told(units)
    num = len(shapes) * (len(RATES) if output is not None and kind.draw is None else 1)
    num += num_runs(shapes[0], has_runner_up=kind.is_one) if what_if else 0
    run_s = max(flags.trial_s(shape, requests) for shape in shapes[:4])
    fewer = "--no-what-if leaves most of them out, " if what_if else ""
    say_how_long(num, run_s, f"{fewer}--num-requests shortens each")
    runs: list[MeshRun] = []
    kept = Kept()
    title = (
        f"{shapes[0] if len(shapes) == 1 else f'{len(shapes)} meshes'}, {flags.rate:g} requests/s"
    )
    with kept, progress(title, len(shapes) * len(requests)) as on_progress:
        for place, shape in enumerate(shapes):

            def ended(num: int, before: int = place * len(requests)) -> None:
                on_progress(before + num)

            runs.append(flags.run(shape, requests, on_progress=ended))
    if not runs:
        # Nothing can be shown: ``_interruptible`` says so.
        raise KeyboardInterrupt
    runs.sort(key=kind.rank)
    found = Explained(binding_limit(runs[0].felt))
    if what_if and kept.is_whole:
        with kept:
            explain(flags, runs[0], found, has_runner_up=kind.is_one)
    facts = [flags.facts(run) | {"impossible": impossible} for run in runs]
    if what_if:
        facts[0]["what_if"] = asdict(found)
    if output is not None:
        best = {} if kind.is_one else {"best": asdict(found)}
        report_files(flags, runs[: kind.num_reported], output, {"runs": facts, **best}, rows)
        if kind.draw is None:
            _draw_rates(flags, runs, output, kept)
        else:
            kind.draw(flags, runs, output)
    if as_json:
        print_json(facts[0] if kind.is_one else facts)
    else:
        kind.show(flags, runs)
        print_lines([*lines(found, flags), *impossible, *_times(flags, runs)])
    return kept.exit_code(is_good=not kind.is_one or runs[0].is_served)


def _show_one(flags: SimFlags, runs: Sequence[MeshRun]) -> None:
    (run,), console = runs, plain_console()
    console.print(
        f"{run.shape}, {flags.policy}: {run.num_requests} requests of {flags.workload} at "
        f"{flags.rate:g}/s, seed {flags.seed}"
    )
    table = plain_table("", *QS)
    for name, values in latencies(run.answers).items():
        table.add_row(name, *(_ms(value) for value in values.values()))
    console.print(table)
    console.print(
        f"attainment {run.attained:.1%} of {limits_text(flags.slo)}; {run.goodput:.2f} good "
        "requests/s a worker"
    )
    print_lines(cached_line(run.cached))
    if run.errors:
        console.print(f"not served: {_errors(run)}")


def _show_all(flags: SimFlags, ranked: Sequence[MeshRun]) -> None:
    console = plain_console()
    console.print(
        f"{ranked[0].num_requests} requests of {flags.workload} at {flags.rate:g}/s, "
        f"{flags.policy}, seed {flags.seed}; {limits_text(flags.slo)}"
    )
    head = ("mesh", "attained", "good/s a worker", "TTFT p50", "p99", "TPOT p50", "p99")
    table = plain_table(*head, "not served", left=("mesh",))
    for run in ranked:
        table.add_row(*_row(run))
    console.print(table)
    if len(ranked) > 1:
        console.print(_first_of(*ranked[:2]))


def _row(run: MeshRun) -> list[str]:
    felt = latencies(run.answers)
    shown = [
        _ms(felt[name][q]) if name in felt else "–"
        for name in ("TTFT", "TPOT")
        for q in ("p50", "p99")
    ]
    shares = (f"{run.attained:.1%}", f"{run.goodput:.2f}")
    return [str(run.shape), *shares, *shown, _errors(run) or "–"]


def _first_of(best: MeshRun, second: MeshRun) -> str:
    """Say which is the better one, and why."""
    if best.attained > second.attained:
        return (
            f"{best.shape} attains most ({best.attained:.1%}), then {second.shape} "
            f"({second.attained:.1%})"
        )
    is_less = best.shape.num_workers < second.shape.num_workers
    why = "fewer workers" if is_less else "more room below its limits"
    return f"{best.shape} and {second.shape} attain the same; {best.shape} has {why}"


def _draw_rates(flags: SimFlags, runs: Sequence[MeshRun], folder: Path, kept: Kept) -> None:
    """Attainment over rate, of each mesh; after Ctrl-C, of the rates that were simulated."""
    found = {str(run.shape): [(run.rate, run.attained, "")] for run in runs}
    rates = [flags.rate * factor for factor in RATES if factor != 1] if kept.is_whole else []
    with kept, progress("attainment over rate", len(runs) * len(rates)) as one_more:
        for run, rate in product(runs, rates):
            attained = flags.variant(rate=rate).run(run.shape).attained
            found[str(run.shape)].append((rate, attained, ""))
            one_more()
    title = f"share within {limits_text(flags.slo)}"
    path = folder / "attainment.svg"
    draw_lines(path, title, ("requests/s", "attained"), found, goal=flags.attainment)


def _times(flags: SimFlags, runs: Sequence[MeshRun]) -> list[str]:
    took_s = sum(run.took_s for run in runs)
    return [
        *flags.about_times([run.shape for run in runs]),
        f"{flags.fidelity}: {sum(run.num_events for run in runs):,} events in {took_s:.1f} s, "
        f"{sum(run.num_requests for run in runs) / took_s:,.0f} requests simulated a second",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _errors(run: MeshRun) -> str:
    return ", ".join(f"{num} {name}" for name, num in run.errors.items())


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
    kind = Study(_show_map, rank=_fewest, draw=_draw_map, num_reported=3)
    return study(kind, flags, shapes, output, what_if=what_if, as_json=as_json)


def _fewest(run: MeshRun) -> tuple[bool, int, float]:
    """The fewest workers that attain; where none do, what attains most."""
    return not run.attains, run.shape.num_workers if run.attains else 0, -run.attained


def _draw_map(flags: SimFlags, runs: Sequence[MeshRun], folder: Path) -> None:
    title = f"attained at {flags.rate:g} requests/s of {flags.workload}"
    shares = {(it.shape.num_of("P"), it.shape.num_of("D")): it.attained for it in runs}
    draw_map(folder / "map.svg", title, {place: it for place, it in shares.items() if place[0]})


def _show_map(flags: SimFlags, ranked: Sequence[MeshRun]) -> None:
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
