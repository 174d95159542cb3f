"""One frame of ``pdmesh top``: the body of ``GET /cluster`` as tables and bars.

Pure: it asks nobody and knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from services.cli import words

BAR_WIDTH: Final = 24
WIDE: Final = 125
"""Columns from which on everything has its place; less leaves out what says least, down to 80."""
LEFT: Final = ("role", "address", "state", "blocks", "prefill → decode", "lane")
WIDE_ONLY: Final = ("tokens", "off by", "cached", "pairs", "count", "size", "p10", "p99")
STATE_STYLES: Final = {"usable": "green", "draining": "yellow", "connecting": "yellow"}
BLOCK_STYLES: Final = {"reserved": ("█", "cyan"), "quarantined": ("▓", "red"), "free": ("░", "dim")}
SPARKS: Final = " ▁▂▃▄▅▆▇█"


def frame(
    url: str, view: Mapping[str, Any] | None, trouble: str = "", *, width: int = WIDE
) -> RenderableType:
    """Return one screen.

    view: the latest answer, None = there was none yet. trouble: why there is no newer one. width:
    of the screen, in characters.
    """
    is_wide = width >= WIDE
    parts: list[RenderableType] = [_head(url, view, is_wide)]
    if trouble:
        kept = "What is below was before that. " if view is not None else ""
        parts.append(Text(f"{trouble}\n{kept}Trying again …", style="bold red"))
    if view is not None:
        parts += [_traffic(view, is_wide), Rule("workers", align="left", style="dim")]
        parts += [_workers(view, width)]
        parts += [Rule("KV transfers, last minute", align="left", style="dim")]
        parts += [_transfers(view, is_wide)]
        if planner := view["planner"]:
            parts += [Rule(f"planner: {planner['mode']}", align="left", style="dim")]
            parts += [_planner(planner)]
        if prefixes := view["hot_prefixes"]:
            parts += [Rule("hottest prefixes, last minutes", align="left", style="dim")]
            parts += [_prefixes(prefixes)]
    return Group(*parts)


def block_bar(blocks: Mapping[str, int], width: int = BAR_WIDTH) -> Text:
    """Return a bar of ``width`` cells whose parts are the states' shares; whatever has at least
    one block is seen."""
    total = max(1, blocks["total"])
    cells: dict[str, int] = {}
    for state in ("quarantined", "reserved"):
        share = blocks[state] * width / total
        room = width - sum(cells.values())
        cells[state] = min(room, max(1, round(share)) if blocks[state] else 0)
    bar = Text()
    for state in ("reserved", "quarantined", "free"):
        mark, style = BLOCK_STYLES[state]
        count = width - sum(cells.values()) if state == "free" else cells[state]
        bar.append(mark * count, style)
    return bar


def sparkline(values: Sequence[float]) -> str:
    """Return one character a value, from blank (nothing) to full (the largest)."""
    largest = max(values, default=0)
    return "".join(SPARKS[math.ceil(value * 8 / largest) if value else 0] for value in values)


def _head(url: str, view: Mapping[str, Any] | None, is_wide: bool) -> Text:
    head = Text("pdmesh top ", style="bold")
    head.append(url, style="not bold")
    if view is None:
        return head
    model: Any = view["model"]
    served = f"{model['id']} ({model['max_model_len']:,} tokens)" if model else "no model yet"
    head.append("  " if is_wide else "\n")
    head.append(f"{served}  {view['version']}  {words.uptime(view['uptime_s'])}  ", "not bold dim")
    if view["ready"]:
        head.append("● ready", "green")
    else:
        head.append(f"● not ready: {view['not_ready_reason']}", "yellow")
    return head


def _traffic(view: Mapping[str, Any], is_wide: bool) -> RenderableType:
    gateway, window = view["gateway"], view["window"]
    row = Table.grid(padding=(0, 4 if is_wide else 2, 0, 0))
    left, middle, right = grids = [Table.grid(padding=(0, 1, 0, 0)) for _ in range(3)]
    for name, style in (("running", "bold"), ("queued", "yellow"), ("refused", "red")):
        left.add_row(name, Text(str(gateway[name]), style if gateway[name] else ""))
    failed = f", {window['failed']} failed" if window["failed"] else ""
    middle.add_row("out", Text(f"{window['output_tokens_per_s']:,.0f}", "bold"), "tokens/s")
    middle.add_row("in", f"{window['prompt_tokens_per_s']:,.0f}", "tokens/s")
    middle.add_row("ended", f"{window['requests']}", f"in {window['seconds']:g} s{failed}")
    quantiles = ("p50", "p90", "p99")
    right.add_row("", *(Text(name, "dim") for name in quantiles))
    for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s")):
        right.add_row(label, *(_ms(window[name], quantile) for quantile in quantiles))
    row.add_row(*grids)
    each = window["output_tokens_each_s"]
    return Group(row, Text(sparkline(each), "green")) if any(each) else row


def _table(rows: Sequence[Mapping[str, str | Text]], is_wide: bool) -> Table:
    """The heads are the names of the cells; where there is little room, some are left out."""
    heads = [name for name in rows[0] if is_wide or name not in WIDE_ONLY]
    table = Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), header_style="dim")
    for name in heads:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in heads))
    return table


def _workers(view: Mapping[str, Any], width: int) -> RenderableType:
    is_wide = width >= WIDE
    rows: list[dict[str, str | Text]] = []
    for worker in view["workers"]:
        blocks = worker["blocks"]
        taken = blocks["total"] - blocks["free"]
        bar = block_bar(blocks, min(BAR_WIDTH, max(8, width - 71)))
        if is_wide:
            bar.append(f" {taken:,} of {blocks['total']:,}", "dim")
            if blocks["quarantined"]:
                bar.append(f", {blocks['quarantined']} in quarantine", "red")
        else:
            bar.append(f" {taken / max(1, blocks['total']):.0%}", "dim")
        rows.append(
            {
                "role": _role(worker),
                "address": worker["address"],
                "state": Text(worker["state"], STATE_STYLES.get(worker["state"], "red")),
                "run": str(worker["running"]),
                "wait": str(worker["waiting"]),
                "tokens": f"{worker['pending_tokens']:,}",
                "step": f"{worker['step_s'] * 1000:.1f} ms",
                "off by": _error(worker),
                "cached": _cached(worker),
                "blocks": bar,
                "pairs": _pairs(worker),
            }
        )
    return _table(rows, is_wide) if rows else Text("none has joined", "dim")


def _error(worker: Mapping[str, Any]) -> Text:
    """Return by what share half of its predicted times to a first token were off; red if it is
    routed by load alone for it."""
    prediction = worker["prediction"]
    if prediction["ttft_error"] is None:
        return Text("")
    style = "" if prediction["believed"] else "red"
    return Text(f"{prediction['ttft_error']:.0%}", style)


def _cached(worker: Mapping[str, Any]) -> str:
    """Return which share of the last minute's prompts its prefix cache had, and of this what came
    from below its pool."""
    prompts = worker["prompts"]
    if not prompts["tokens"]:
        return ""
    below = [
        f", {tier} {100 * prompts[f'{tier}_tokens'] / prompts['tokens']:.0f}"
        for tier in ("dram", "ssd")
        if prompts[f"{tier}_tokens"]
    ]
    return f"{prompts['cached_tokens'] / prompts['tokens']:.0%}{''.join(below)}"


def _role(worker: Mapping[str, Any]) -> str:
    """Return what a worker is at the moment; of one that may be either its home, too."""
    if worker["moves"]:
        is_away = worker["pool"] != worker["home"]
        return f"{worker['pool']} ({worker['home']})" if is_away else worker["pool"]
    is_colocated = worker["incarnation"] in worker["paired"]
    return "colocated" if is_colocated else worker["role"]


def _pairs(worker: Mapping[str, Any]) -> str:
    """Return how many others it can push KV to; '' of one that never does."""
    if not worker["moves"] and worker["role"] != "prefill":
        return ""
    return str(len({*worker["paired"]} - {worker["incarnation"]}))


def _transfers(view: Mapping[str, Any], is_wide: bool) -> RenderableType:
    addresses = {worker["incarnation"]: worker["address"] for worker in view["workers"]}
    rows: list[dict[str, str | Text]] = []
    for pair in view["transfers"]:
        ends = [addresses.get(pair[role], f"{pair[role]} (gone)") for role in ("prefill", "decode")]
        rows.append(
            {
                "prefill → decode": " → ".join(ends),
                "lane": pair["lane"] or "?",
                "count": f"{pair['count']:,}",
                "size": words.size(pair["bytes"]),
                "rate p50": _rate(pair["gb_per_s"], "p50"),
                "p10": _rate(pair["gb_per_s"], "p10"),
                "exposed p50": _ms(pair["exposed_s"], "p50"),
                "p99": _ms(pair["exposed_s"], "p99"),
            }
        )
    return _table(rows, is_wide) if rows else Text("none", "dim")


def _planner(planner: Mapping[str, Any]) -> RenderableType:
    lines = [
        f"{role}: {planner['present'].get(role, 0)} here, {num} wanted"
        + (f", busy {planner['busy'][role]:.0%}" if role in planner["busy"] else "")
        for role, num in planner["wanted"].items()
    ]
    parts = [Text(";  ".join(lines))] if lines else []
    parts += [Text(order, "yellow") for order in planner["orders"]]
    if planner["hold"]:
        parts.append(Text(f"holds: {planner['hold']}", "dim"))
    if planner["limit"]:
        parts.append(Text(planner["limit"], "red"))
    return Group(*parts)


def _prefixes(prefixes: Sequence[Mapping[str, Any]]) -> RenderableType:
    return _table(
        [
            {
                "hash": it["hash"],
                "tokens": f"{it['tokens']:,}",
                "prompts": f"{it['share']:.0%}",
                "workers": f"{it['workers']}",
            }
            for it in prefixes
        ],
        is_wide=True,
    )


def _ms(percentiles: Mapping[str, float] | None, name: str) -> str:
    return words.milliseconds(percentiles[name] if percentiles else None)


def _rate(rates: Mapping[str, float] | None, name: str) -> str:
    return words.speed(rates[name]) if rates else "-"
