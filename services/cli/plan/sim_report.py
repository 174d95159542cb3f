"""Simulated runs in the form of `pdmesh bench`: the same report.json, requests.csv and report.svg,
so that simulated and measured requests lie in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from services.cli.bench.records import Ending, Record, Run
from services.cli.bench.report import (
    read_rows,
    report_of,
    require_folder,
    save_picture,
    write_report,
)
from services.cli.bench.workload import Ask, Workload
from services.cli.plan.sim_flags import SimFlags
from services.planner.mesh_run import MeshRun

_START: Final = 1.0
"""Of a run, on its own clock: a record that left at 0 counts as one that did not leave."""


def bench_run(flags: SimFlags, run: MeshRun) -> Run:
    """Return a simulated run as one that was measured; its client is never late."""
    lengths = flags.variant(rate=run.rate).asks([part.unit for part in run.shape.parts])
    asks = tuple(
        Ask(num_input=ask.num_input, num_output=ask.num_output, due_s=answer.asked_at)
        for ask, answer in zip(lengths, run.answers, strict=False)
    )
    found = Run(
        Workload(name=flags.workload, asks=asks, rate=run.rate), rate=run.rate, started_at=_START
    )
    last = _START
    for index, (ask, answer) in enumerate(zip(asks, run.answers, strict=True)):
        due_at = _START + answer.asked_at
        record = Record(ask, index, due_at, f"simulated {run.shape}", sent_at=due_at)
        record.num_prompt, record.is_counted = ask.num_input, True
        for at in answer.token_times:
            record.add(_START + at, 1)
        if answer.is_complete:
            record.end = Ending.COMPLETE
        else:
            record.fail(Ending.FAILED, answer.error or "not over")
        record.ended_at = record.times[-1] if record.times else due_at
        last = max(last, record.ended_at)
        found.records.append(record)
    found.ended_at, found.num_ended = last, len(found.records)
    return found


def report_files(
    flags: SimFlags,
    runs: Sequence[MeshRun],
    folder: Path,
    plan: Mapping[str, Any],
    beside: Sequence[Path] = (),
) -> None:
    """Write report.json, requests.csv and report.svg. plan: what else was found; beside: folders of
    reports whose requests come into the picture. Raises CannotRun."""
    rows = [row for path in beside for row in read_rows(path, path.name)]
    require_folder(folder)
    measured = [bench_run(flags, run) for run in runs]
    report = report_of(
        measured,
        flags.slo,
        flags=_plain(asdict(flags)),
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
    write_report({**report, "plan": plan}, measured, folder, rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = cast("Mapping[str, Any]", value)
        return {name: _plain(one) for name, one in found.items()}
    return str(value) if isinstance(value, Path) else value


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
        style = "o-" if len({y for _, y, _ in ordered}) > 1 or len(ordered) > 1 else "o"
        plot.plot([x for x, _, _ in ordered], [y for _, y, _ in ordered], style, label=name)
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
