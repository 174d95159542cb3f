"""What ``pdmesh bench`` shows: a bar while it runs, tables at the end. Knows no server.

The bar is drawn by the loop itself, twice a second, a millisecond each time: a thread of rich's own
would take the interpreter away from answers that are being read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from services.cli.bench.records import MISSED, Run

INTERVAL_S: Final = 0.5
METRICS: Final = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
COLUMNS: Final = ("p50", "p90", "p95", "p99", "max")


@contextlib.asynccontextmanager
async def progress_of(run: Run, console: Console, title: str) -> AsyncGenerator[None]:
    """Show how far a run has come, where somebody looks."""
    if not console.is_terminal:
        yield
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[facts]}"),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    task = bar.add_task(title, total=len(run.workload.asks) or 1, facts="")

    async def watch() -> None:
        while True:
            bar.update(task, completed=run.num_ended, facts=_facts(run), refresh=True)
            await asyncio.sleep(INTERVAL_S)

    with bar:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()


def _facts(run: Run) -> str:
    num_sent = len(run.records)
    num_missed = sum(record.end in MISSED for record in run.records)
    facts = f"{run.num_ended}/{len(run.workload.asks)} done, {num_sent - run.num_ended} in flight"
    return facts + (f", {num_missed} missed" if num_missed else "")


def report_view(report: Mapping[str, Any]) -> RenderableType:
    """Return the report for a terminal: one run in full, several as a table."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    parts: list[RenderableType] = [_head(report), Text("")]
    if len(runs) == 1:
        parts.append(_one_run(runs[0]))
    elif runs:
        parts.append(_many_runs(runs))
    parts += [Text(note, style="yellow") for note in notes_of(report)]
    if report["goodput"] is not None:
        parts += [Text(""), _goodput(report)]
    return Group(*parts)


WHY_VOID: Final = (
    "a VOID run tells of this client, not of the server: it was kept from sending or reading in "
    "time, mostly by a server on the same cores. Lower the rates (--rates 0.2,0.5,1), shorten the "
    "requests (--scale-lengths 0.1), leave the client a core (`pdmesh up --threads`, taskset, "
    "nice -n -10), or measure from another machine"
)


def notes_of(report: Mapping[str, Any]) -> list[str]:
    """Return, in sentences, what a reader must know before believing the figures."""
    notes: list[str] = []
    for run in report["runs"]:
        name = f"{rate_text(run['rate'])}: " if len(report["runs"]) > 1 else ""
        notes += [f"{name}VOID, {reason}" for reason in run["void"]]
        if run["is_interrupted"]:
            notes.append(f"{name}interrupted; what had not ended is left out")
        if run["closed_loop_limit"]:
            notes.append(
                f"{name}closed loop, at most {run['closed_loop_limit']} requests at once: "
                "latencies count from sending, and a slow server meets less load"
            )
        if run["num_short"] and report["flags"]["ignore_eos"]:
            notes.append(f"{name}answers shorter than asked: {run['num_short']}")
        for words, count in run["errors"].items():
            notes.append(f"{name}{count} x {words}")
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
    """Return a rate for people."""
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


def _head(report: Mapping[str, Any]) -> Text:
    found = report["endpoints"][0]
    head = Text("pdmesh bench ", style="bold")
    head.append(", ".join(one["url"] for one in report["endpoints"]), style="not bold")
    head.append(
        f"  {found['model']}  {found['api']}, prompts of {found['prompts']}, tokens counted "
        f"{found['counts']}",
        style="not bold dim",
    )
    return head


def _one_run(run: Mapping[str, Any]) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for key, label in METRICS.items():
        spread: Mapping[str, float] = run[key] or {}
        table.add_row(label, *(time_text(spread.get(name)) for name in COLUMNS))
    lines = [
        f"{_ends(run)}, {run['submitted_per_s']:.3g} requests/s for {run['span_s']:.3g} s",
        f"{run['input_tokens_per_s']:,.0f} prompt tokens/s{_cached(run)}, "
        f"{run['output_tokens_per_s']:,.0f} answer tokens/s",
        f"attained the SLO: {_share(run['attainment'])} of the requests, "
        f"{run['attained_per_s']:.3g}/s",
        _client_line(run["client"]),
    ]
    return Group(*(Text(line) for line in lines[:3]), Text(""), table, Text(lines[3], style="dim"))


def _many_runs(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("rate", "requests", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p50",
             "tokens/s", "attained", "")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head in ("requests", "") else "right")
    for run in runs:
        spreads: list[dict[str, float]] = [run[key] or {} for key in METRICS]
        ttft, tpot, itl, e2e = spreads
        table.add_row(
            rate_text(run["rate"]),
            _ends(run),
            time_text(ttft.get("p50")),
            time_text(ttft.get("p99")),
            time_text(tpot.get("p50")),
            time_text(tpot.get("p99")),
            time_text(itl.get("p99")),
            time_text(e2e.get("p50")),
            f"{run['output_tokens_per_s']:,.0f}",
            _share(run["attainment"]),
            Text("VOID", style="bold red") if run["void"] else "",
        )
    return table


def _goodput(report: Mapping[str, Any]) -> Text:
    found, slo = report["goodput"], report["slo"]
    limits = (
        f"{found['target']:.0%} within TTFT {time_text(slo['ttft_s'])} and TPOT "
        f"{time_text(slo['tpot_s'])}"
    )
    text = Text("goodput ", style="bold")
    if not found["rate"]:
        return text.append(f"0: no rate that was tried attains {limits}", style="not bold")
    text.append(f"{found['rate']:.4g} requests/s", style="bold green")
    above = found["lowest_miss"]
    end = "" if above is None else f"; {above:.4g}/s misses"
    if not found["is_conclusive"]:
        end += "; it may be more: the client fell behind, or was stopped"
    return text.append(f" with {limits}{end}", style="not bold")


def _ends(run: Mapping[str, Any]) -> str:
    ends = {name: count for name, count in run["ends"].items() if name != "complete"}
    words = [f"{run['ends'].get('complete', 0)} complete"]
    return ", ".join([*words, *(f"{count} {name}" for name, count in ends.items())])


def _client_line(client: Mapping[str, Any]) -> str:
    lag: dict[str, float] = client["dispatch_lag_s"] or {}
    return (
        f"client: requests left late p99 {time_text(lag.get('p99'))}, event loop late "
        f"{client['late_share']:.2%} of the time, CPU {client['cpu_share']:.0%} of a core"
    )


def _cached(run: Mapping[str, Any]) -> str:
    share = run["cached_tokens"] / run["input_tokens"] if run["input_tokens"] else 0.0
    return f" ({share:.0%} of them cached)" if share else ""


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
