"""Simulated runs in the form of `pdmesh bench`: the same report.json, requests.csv and report.svg,
so that simulated and measured requests lie in one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from services.cli.bench.records import Ending, Record, Run
from services.cli.bench.report import (
    ReportedRequest,
    read_requests,
    report_of,
    require_folder,
    save_picture,
    write_report,
)
from services.cli.bench.workload import Ask, Workload
from services.cli.plan.seen import SeenTraffic
from services.cli.plan.sim_flags import SimFlags
from services.cli.sources import OUTPUT
from services.planner.mesh_run import MeshRun
from services.sim.open_loop import SimAnswer
from shared.errors import InvalidRequest

OutputFlag = Annotated[
    Path | None,
    Parameter(
        group=OUTPUT,
        help="Folder for report.json, requests.csv and report.svg, as of pdmesh bench, and for the "
        "plan's own picture.",
    ),
]

_START: Final = 1.0
"""Of a run, on its own clock: a record that left at 0 counts as one that did not leave."""


Told = tuple[Sequence[tuple[float, int]], str]
"""Of a request: when tokens came, and how many; and what it failed at, '' = nothing."""


def simulated_run(
    name: str,
    asks: Sequence[Ask],
    answers: Sequence[SimAnswer],
    label: str,
    rate: float | None,
) -> Run:
    """Return simulated requests as a run that was measured. name: of the workload. label: in the
    place of a URL."""
    pairs = zip(asks, answers, strict=False)
    asked = tuple(replace(ask, due_s=answer.arrived_at) for ask, answer in pairs)
    told = [
        ([(at, 1) for at in it.token_times], "" if it.is_complete else it.error or "not over")
        for it in answers
    ]
    return _as_run(Workload(name=name, asks=asked, rate=rate), label, told)


def seen_run(seen: SeenTraffic, asks: Sequence[Ask]) -> Run:
    """Return what receipts tell as a run: an answer's first token, and the rest at its end."""
    told: list[Told] = []
    for ask, it in zip(asks, seen.requests, strict=True):
        ttft_s, more = it.ttft_s, it.num_output - 1
        first = [] if ttft_s is None else [(ask.due_s + ttft_s, 1)]
        rest = [(ask.due_s + it.e2e_s, more)] if first and more > 0 else []
        told.append((first + rest, "" if it.is_whole else "it failed, or goes on"))
    return _as_run(Workload(name=seen.source, asks=tuple(asks)), seen.source, told)


def _as_run(workload: Workload, label: str, told: Iterable[Told]) -> Run:
    """Its client is never late."""
    found = Run(workload, rate=workload.rate, started_at=_START)
    for index, (ask, (tokens, error)) in enumerate(zip(workload.asks, told, strict=True)):
        due_at = _START + ask.due_s
        record = Record(ask, index, due_at, label, sent_at=due_at)
        record.num_prompt, record.is_counted = ask.num_input, True
        for at_s, num in tokens:
            record.add(_START + at_s, num)
        record.end = Ending.COMPLETE
        if error:
            record.fail(Ending.FAILED, error)
        record.ended_at = record.times[-1] if record.times else due_at
        found.ended_at = max(found.ended_at, record.ended_at)
        found.records.append(record)
    found.num_ended = len(found.records)
    return found


def begin_report(
    folder: Path | None, beside: Sequence[Path] | None = None
) -> list[ReportedRequest]:
    """See to it, before anything is simulated, that a report can be written there; returns the
    requests of reports that come into its picture. Raises CannotRun, InvalidRequest."""
    if folder is None:
        if beside:
            raise InvalidRequest("--beside needs --output FOLDER: there is no picture without")
        return []
    require_folder(folder)
    return [row for path in beside or () for row in read_requests(path, path.name)]


def report_files(
    flags: SimFlags,
    runs: Sequence[MeshRun],
    folder: Path,
    plan: Mapping[str, Any],
    beside: Sequence[ReportedRequest] = (),
) -> None:
    """Write report.json, requests.csv and report.svg. plan: what else was found; beside: requests
    of other reports that come into the picture."""
    measured = [
        simulated_run(
            flags.workload,
            flags.variant(rate=run.rate).workload_of([it.unit for it in run.shape.parts]).asks,
            run.answers,
            f"simulated {run.shape}",
            run.rate,
        )
        for run in runs
    ]
    report = report_of(
        measured,
        flags.slo,
        flags=asdict(flags),
        endpoints=[
            {
                "url": f"simulated {run.shape}",
                "model": flags.times.kv.name,
                "api": "simulated",
                "prompts": "of token ids",
                "counts": "one by one",
            }
            for run in runs
        ],
    )
    # Equal seeds give equal bytes, whenever they are asked.
    write_report({**report, "written_at": None, "plan": plan}, measured, folder, beside)


def draw_lines(
    path: Path,
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float, str]]],
    goal: float | None = None,
) -> None:
    """Draw points, (x, y, what stands beside it), of each name joined by a line."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4.5), layout="constrained")
    plot = figure.subplots()
    for name, points in lines.items():
        ordered = sorted(points)
        plot.plot([x for x, _, _ in ordered], [y for _, y, _ in ordered], "o-", label=name)
        for x, y, word in ordered:
            if word:
                plot.annotate(word, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    if goal is not None:
        plot.axhline(goal, color="black", linestyle="--")
    plot.set(title=title, xlabel=labels[0], ylabel=labels[1])
    plot.set_ylim(bottom=0)
    plot.legend()
    save_picture(figure, path)


def draw_map(path: Path, title: str, cells: Mapping[tuple[int, int], float]) -> None:
    """Draw numbers of prefill and decode workers as a map, the attained share in each field."""
    from matplotlib.figure import Figure

    most = max(max(place) for place in cells)
    grid = [
        [cells.get((num, other), float("nan")) for num in range(1, most + 1)]
        for other in range(1, most + 1)
    ]
    figure: Any = Figure(figsize=(6.5, 5.5), layout="constrained")
    plot = figure.subplots()
    extent = (0.5, most + 0.5, 0.5, most + 0.5)
    image = plot.imshow(grid, origin="lower", extent=extent, vmin=0, vmax=1, cmap="RdYlGn")
    for (num, other), share in cells.items():
        plot.text(num, other, f"{share:.0%}", ha="center", va="center", fontsize=8)
    plot.set(title=title, xlabel="prefill workers", ylabel="decode workers")
    ticks = range(1, most + 1)
    plot.set_xticks(ticks)
    plot.set_yticks(ticks)
    figure.colorbar(image, label="attained")
    save_picture(figure, path)
