"""A measurement as files: report.json (all figures), requests.csv (one line a request) and
report.html, one page with its plots inside that asks no network for anything.
"""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jinja2
import orjson
from rich.console import Console

from services.cli.bench.measurement import Measurement
from services.cli.bench.plots import plot_rates, plot_run
from services.cli.bench.records import Record, Run
from services.cli.bench.summary import summarize
from services.cli.bench.view import rate_text, report_view, time_text
from shared.telemetry.definitions import Slo, TpotRule
from shared.version import VERSION

SCHEMA: Final = 1
"""Of report.json; grows when a field changes its meaning."""

WIDTH: Final = 140
"""Of a table that nobody's window holds."""


def build_report(measurement: Measurement) -> dict[str, Any]:
    """Return everything that was measured; JSON's types only, an endless rate is null."""
    slo, search = measurement.slo.slo, measurement.search
    flags = [measurement.load, measurement.requests, measurement.slo]
    return {
        "pdmesh_bench": SCHEMA,
        "version": VERSION,
        "written_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": _environment(),
        "flags": {key: _plain(value) for group in flags for key, value in asdict(group).items()},
        "endpoints": [asdict(found) for found in measurement.descriptions],
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "tpot_rule": slo.tpot_rule.value},
        "runs": [summarize(run, slo) for run in measurement.runs if run.records],
        "goodput": None
        if search is None
        else {
            "rate": search.best,
            "target": search.target,
            "lowest_miss": search.lowest_miss,
            "is_conclusive": search.next_rate() is None,
            "tried": [{"rate": rate, "attainment": share} for rate, share in search.tried],
        },
    }


def write_report(report: Mapping[str, Any], runs: Sequence[Run], folder: Path) -> None:
    """Write the three files into a folder that exists, over older ones."""
    slo = slo_of(report)
    runs = [run for run in runs if run.records]
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2)
    (folder / "report.json").write_bytes(text + b"\n")
    rows = [_row(number, run, one, slo) for number, run in enumerate(runs) for one in run.records]
    with (folder / "requests.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    (folder / "report.html").write_text(render(report, runs), encoding="utf-8")


def slo_of(report: Mapping[str, Any]) -> Slo:
    """Return the limits that a report was judged by."""
    limits = report["slo"]
    return Slo(limits["ttft_s"], limits["tpot_s"], TpotRule(limits["tpot_rule"]))


def render(report: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the page: what the terminal shows, with every run in full, and its plots."""
    shown = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False)
    shown.print(report_view(report, in_full=True))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    filters = {"time": time_text, "rate": rate_text}
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return environment.get_template("report.html").render(
        report=report,
        view=shown.export_html(inline_styles=True, code_format="{code}"),
        rate_plots=plot_rates(report),
        run_plots=[plot_run(run, slo_of(report)) for run in runs],
    )


def _row(number: int, run: Run, record: Record, slo: Slo) -> dict[str, Any]:
    outcome = record.outcome(is_closed_loop=run.limit is not None)
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
        "tpot_s": _seconds(outcome.tpot_by(slo.tpot_rule) if tokens else None),
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


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _environment() -> dict[str, Any]:
    """The client's machine: where a server runs elsewhere, nothing of it."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "uvloop": version("uvloop") if find_spec("uvloop") else None,
    }
