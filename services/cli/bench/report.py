"""A measurement as files: report.json (all figures), requests.csv (one line a request) and
report.svg (plots, by matplotlib)."""

from __future__ import annotations

import csv
import datetime
import importlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from services.cli.bench.measurement import Measurement
from services.cli.bench.records import Record, Run
from services.cli.bench.search import RateSearch
from services.cli.bench.summary import summarize
from services.cli.bench.view import rate_text
from services.cli.flags import CannotRun
from services.planner.rows import read_rows
from shared.errors import InvalidRequest
from shared.telemetry.definitions import Slo
from shared.version import VERSION

SCHEMA: Final = 2
"""Of report.json; grows when a field changes its meaning."""


def require_folder(output: Path) -> None:
    """Make the folder before anything is measured: minutes of measuring must not be lost.

    Raises CannotRun: it cannot be written to, or nothing here can draw.
    """
    if find_spec("matplotlib") is None:
        raise CannotRun("--output draws with matplotlib: pip install 'pdmesh[bench]'")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CannotRun(f"cannot write to --output {output} ({reason})") from None
    if not os.access(output, os.W_OK):
        raise CannotRun(f"cannot write to --output {output} (permission denied)")


def build_report(measurement: Measurement) -> dict[str, Any]:
    """Return everything that was measured; JSON's types only, an endless rate is null."""
    flags = measurement.flags
    report = report_of(
        measurement.runs,
        flags.slo,
        flags={**asdict(flags), "trace": str(flags.trace or "")},
        endpoints=[asdict(found) for found in measurement.descriptions],
        search=measurement.search,
    )
    return {**report, "mesh": measurement.mesh}


def report_of(
    runs: Sequence[Run],
    slo: Slo,
    *,
    flags: Mapping[str, Any],
    endpoints: Sequence[Mapping[str, Any]],
    search: RateSearch | None = None,
) -> dict[str, Any]:
    """Return the report of runs, measured or simulated."""
    return {
        "pdmesh_bench": SCHEMA,
        "version": VERSION,
        "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": _environment(),
        "flags": flags,
        "endpoints": endpoints,
        "slo": asdict(slo),
        "runs": [summarize(run, slo) for run in runs if run.records],
        "goodput": None
        if search is None
        else {
            "rate": search.best,
            "target": search.target,
            "lowest_miss": search.lowest_miss,
            "is_conclusive": search.is_conclusive,
            "tried": [{"rate": rate, "attainment": share} for rate, share in search.tried],
        },
    }


class ReportedRequest(msgspec.Struct):
    """What is read again of a line of requests.csv. input: as the server counted it, 0 = not."""

    run: str
    index: int
    end: str
    due_s: float
    input_asked: int
    output: int
    rate: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    input: int = 0
    cached: int = 0


def read_requests(folder: Path, name: str) -> list[ReportedRequest]:
    """Return the requests of an earlier report, its runs called by a name of their own.

    Raises CannotRun: there is no such report.
    """
    try:
        rows = [row for _, row in read_rows(folder / "requests.csv", ReportedRequest)]
    except InvalidRequest as error:
        raise CannotRun(f"cannot read the report in {folder} ({error})") from None
    return [msgspec.structs.replace(row, run=f"{name} {row.run}") for row in rows]


def write_report(
    report: Mapping[str, Any],
    runs: Sequence[Run],
    folder: Path,
    beside: Sequence[ReportedRequest] = (),
) -> None:
    """Write the three files into a folder that exists, over older ones; without a request,
    report.json alone. beside: requests of other reports, drawn into the same picture."""
    slo = Slo(**report["slo"])
    runs = [run for run in runs if run.records]
    text = orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2)
    (folder / "report.json").write_bytes(text + b"\n")
    rows = [_row(number, run, one, slo) for number, run in enumerate(runs) for one in run.records]
    if not rows:
        return
    with (folder / "requests.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    own = [row for _, row in read_rows(folder / "requests.csv", ReportedRequest)]
    _plot([*own, *beside], slo, folder / "report.svg")


def _plot(rows: Sequence[ReportedRequest], slo: Slo, path: Path) -> None:
    """Draw, of each run: which share of TTFT and of TPOT is at most so large, and TTFT by time of
    arrival, where a backlog climbs from left to right."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 4), layout="constrained")
    ttft, tpot, arrivals = figure.subplots(1, 3)
    for run in dict.fromkeys(row.run for row in rows):
        of = [row for row in rows if row.run == run and row.end == "complete"]
        name = f"{run}: {rate_text(of[0].rate) if of else 'nothing complete'}"
        ttft.ecdf([row.ttft_s for row in of] or [0.0], label=name)
        tpot.ecdf([row.tpot_s for row in of if row.output > 1] or [0.0])
        arrivals.plot([row.due_s for row in of], [row.ttft_s for row in of], ".")
    for plot, title, limit in ((ttft, "TTFT", slo.ttft_s), (tpot, "TPOT", slo.tpot_s)):
        plot.axvline(limit, color="black", linestyle="--")
        plot.set(title=f"{title}: share of requests up to", xlabel="s", xlim=(0, None))
    arrivals.axhline(slo.ttft_s, color="black", linestyle="--")
    arrivals.set(title="TTFT by time of arrival", xlabel="s into the run", ylim=(0, None))
    ttft.legend()
    save_picture(figure, path)


def save_picture(figure: Any, path: Path) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    # Text stays text: small, selectable. Names within a picture come from what it shows.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pdmesh"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _row(number: int, run: Run, record: Record, slo: Slo) -> dict[str, Any]:
    outcome = record.outcome()
    has_left = record.sent_at > 0
    tokens = bool(outcome.token_times)
    return {
        "run": number,
        "rate": "" if run.rate is None else run.rate,
        "index": record.index,
        "url": record.url,
        "end": record.end.value,
        "meets_slo": int(outcome.meets(slo)),
        "due_s": _seconds(record.due_at - run.started_at),
        "sent_s": _seconds(record.sent_at - run.started_at if has_left else None),
        "lag_s": _seconds(record.lag_s if has_left else None),
        "ttft_s": _seconds(outcome.ttft_s),
        "tpot_s": _seconds(outcome.tpot_s if tokens else None),
        "itl_max_s": _seconds(max(outcome.itl_s, default=0.0) if tokens else None),
        "e2e_s": _seconds(outcome.e2e_s),
        "input_asked": record.ask.num_input,
        "input": record.num_prompt,
        "cached": record.num_cached,
        "output_asked": record.ask.num_output,
        "output": record.num_output,
        "messages": len(record.times),
        "error": record.error,
    }


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _environment() -> dict[str, Any]:
    """The client's machine: where a server runs elsewhere, nothing of it."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "uvloop": version("uvloop"),
    }
