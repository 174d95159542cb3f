"""What ``pdmesh bench`` shows: a bar while it runs, tables at the end. Knows no server."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from services.cli.bench.records import MISSED, Run
from services.cli.bench.summary import NAMES
from services.cli.words import plain_table
from shared.runtime.groups import TaskGroup, plain_errors
from shared.telemetry.definitions import Slo

INTERVAL_S: Final = 0.5
METRICS: Final = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}

WHY_VOID: Final = (
    "a VOID run tells of this client, not of the server: it was kept from sending or reading in "
    "time, mostly by a server on the same cores. Lower the rates (--rates 0.2,0.5,1), shorten the "
    "requests (--scale-lengths 0.1), leave the client a core (`pdmesh up --threads`, taskset, "
    "nice -n -10), or measure from another machine"
)


@contextlib.asynccontextmanager
async def progress_of(run: Run, console: Console, title: str) -> AsyncGenerator[None]:
    """Show how far a run has come, where somebody looks.

    The loop itself draws, twice a second: a thread of rich's own would take the interpreter away
    from answers that are being read.
    """

    async def watch() -> None:
        while True:
            missed = sum(record.end in MISSED for record in run.records)
            text = Text(
                f"{title}: {run.num_ended}/{len(run.workload.asks)} done, "
                f"{len(run.records) - run.num_ended} in flight, {missed} missed   "
            )
            console.print(text, end="\r", no_wrap=True, overflow="ellipsis")
            await asyncio.sleep(INTERVAL_S)

    if not console.is_terminal:
        yield
        return
    with plain_errors():
        async with TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()
                console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def report_view(report: Mapping[str, Any]) -> RenderableType:
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    found = report["endpoints"][0]
    head = Text("pdmesh bench ", style="bold")
    head.append(", ".join(one["url"] for one in report["endpoints"]), style="not bold")
    about = f"{found['api']}, prompts of {found['prompts']}, tokens counted {found['counts']}"
    head.append(f"  {found['model']}  {about}", style="not bold dim")
    parts: list[RenderableType] = [head, Text("")]
    parts += [_many_runs(runs)] if len(runs) > 1 else _one_run(runs[0])
    parts += [Text(note, style="yellow") for note in notes_of(report)]
    if report["goodput"] is not None:
        parts += [Text(""), _goodput(report)]
    return Group(*parts)


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """Return, in sentences, what a reader must know before believing the figures."""
    notes: list[str] = []
    for run in report["runs"]:
        name = f"{rate_text(run['rate'])}: " if len(report["runs"]) > 1 else ""
        notes += [f"{name}VOID, {reason}" for reason in run["void"]]
        if run["is_interrupted"]:
            notes.append(f"{name}interrupted; what had not ended is left out")
        if run["num_short"] and report["flags"]["ignore_eos"]:
            notes.append(f"{name}answers shorter than asked: {run['num_short']}")
        notes += [f"{name}{count} x {words}" for words, count in run["errors"].items()]
    if any(run["void"] for run in report["runs"]):
        notes.append(WHY_VOID)
    planned: Mapping[str, Any] = report["runs"][0]["workload"] if report["runs"] else {}
    if planned.get("num_skipped"):
        notes.append(
            "requests of the trace left out, for they do not fit into the model's context: "
            f"{planned['num_skipped']} (--scale-lengths, --max-input)"
        )
    if planned.get("num_cut"):
        notes.append(f"requests cut to the limits of length: {planned['num_cut']}")
    return notes


def rate_text(rate: float | None) -> str:
    if rate is None:
        return "the trace's own rate"
    return "all at once" if math.isinf(rate) else f"{rate:.4g}/s"


def time_text(seconds: float | None) -> str:
    """Return a duration in three digits, in the unit that suits it."""
    if seconds is None:
        return "-"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def limits_text(slo: Slo) -> str:
    return f"TTFT {time_text(slo.ttft_s)} and TPOT {time_text(slo.tpot_s)}"


def _one_run(run: Mapping[str, Any]) -> Sequence[RenderableType]:
    share = run["cached_tokens"] / run["input_tokens"] if run["input_tokens"] else 0.0
    cached = f" ({share:.0%} of them cached)" if share else ""
    client = run["client"]
    late = _time(client, "dispatch_lag_s", "p99")
    rate = run["submitted_per_s"]
    how = f"{rate:.3g} requests/s for" if rate else "all sent at once, over"
    rows = [[label, *(_time(run, key, q) for q in NAMES)] for key, label in METRICS.items()]
    if run["refusal_s"]:
        rows.append(["refused", *(_time(run, "refusal_s", q) for q in NAMES)])
    return [
        Text(f"{_ends(run)}, {how} {run['span_s']:.3g} s"),
        Text(
            f"{run['input_tokens_per_s']:,.0f} prompt tokens/s{cached}, "
            f"{run['output_tokens_per_s']:,.0f} answer tokens/s"
        ),
        Text(
            f"attained the SLO: {_share(run['attainment'])} of the requests, "
            f"{run['attained_per_s']:.3g}/s"
        ),
        Text(""),
        _table(("", *NAMES), rows),
        Text(
            f"client: requests left late p99 {late}, event loop late "
            f"{client['late_share']:.2%} of the time, CPU {client['cpu_share']:.0%} of a core",
            style="dim",
        ),
    ]


def _many_runs(runs: Sequence[Mapping[str, Any]]) -> Table:
    shown = (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p50"), ("tpot_s", "p99"),
             ("itl_s", "p99"), ("e2e_s", "p50"))  # fmt: skip
    heads = ("rate", "requests", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p50",
             "tokens/s", "attained", "")  # fmt: skip
    rows = [
        [
            rate_text(run["rate"]),
            _ends(run),
            *(_time(run, key, quantile) for key, quantile in shown),
            f"{run['output_tokens_per_s']:,.0f}",
            _share(run["attainment"]),
            Text("VOID", style="bold red") if run["void"] else "",
        ]
        for run in runs
    ]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    table = plain_table(*heads, left=("requests", ""))
    for row in rows:
        table.add_row(*row)
    return table


def _goodput(report: Mapping[str, Any]) -> Text:
    found, slo = report["goodput"], report["slo"]
    limits = f"{found['target']:.0%} within {limits_text(Slo(**slo))}"
    text = Text("goodput ", style="bold")
    if not found["rate"]:
        return text.append(f"0: no rate that was tried attains {limits}", style="not bold")
    text.append(f"{found['rate']:.4g} requests/s", style="bold green")
    above = found["lowest_miss"]
    end = "" if above is None else f"; {above:.4g}/s misses"
    if not found["is_conclusive"]:
        end += "; it may be more: the search did not come to its end"
    return text.append(f" with {limits}{end}", style="not bold")


def _ends(run: Mapping[str, Any]) -> str:
    others = [f"{count} {name}" for name, count in run["ends"].items() if name != "complete"]
    return ", ".join([f"{run['ends'].get('complete', 0)} complete", *others])


def _time(facts: Mapping[str, Any], key: str, quantile: str) -> str:
    return time_text(facts[key][quantile] if facts[key] else None)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
