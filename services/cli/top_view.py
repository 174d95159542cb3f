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

BAR_WIDTH: Final = 24
WIDE: Final = 125
"""Columns from which on everything has its place; less leaves out what says least, down to 80."""
STATE_STYLES: Final = {"usable": "green", "draining": "yellow", "connecting": "yellow"}
BLOCK_STYLES: Final = {
    "reserved": ("█", "cyan"),
    "quarantined": ("▓", "red"),
    "free": ("░", "dim"),
}
SPARKS: Final = " ▁▂▃▄▅▆▇█"
_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


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
        kept = "; what is below was before that" if view is not None else ""
        parts.append(Text(f"{trouble}{kept}. Trying again …", style="bold red"))
    if view is not None:
        parts += [_traffic(view, is_wide), Rule("workers", align="left", style="dim")]
        parts += [_workers(view, width)]
        parts += [Rule("KV transfers, last minute", align="left", style="dim")]
        parts += [_transfers(view, is_wide)]
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
    head.append(f"{served}  {view['version']}  {_duration(view['uptime_s'])}  ", "not bold dim")
    if view["ready"]:
        head.append("● ready", "green")
    else:
        head.append(f"● not ready: {view['not_ready_reason']}", "yellow")
    return head


def _traffic(view: Mapping[str, Any], is_wide: bool) -> RenderableType:
    gateway, window = view["gateway"], view["window"]
    gap = (0, 2 if is_wide else 1, 0, 0)
    left = Table.grid(padding=gap)
    queued = Text(str(gateway["queued"]), "yellow" if gateway["queued"] else "")
    refused = Text(str(gateway["refused"]), "red" if gateway["refused"] else "")
    for name, count, meaning in (
        ("running", Text(str(gateway["running"]), "bold"), "in progress"),
        ("queued", queued, "waiting for a place"),
        ("refused", refused, "since the gateway started"),
    ):
        left.add_row(name, count, *([meaning] if is_wide else []))
    middle = Table.grid(padding=gap)
    failed = f", {window['failed']} failed" if window["failed"] else ""
    middle.add_row("out", Text(f"{window['output_tokens_per_s']:,.0f}", "bold"), "tokens/s")
    middle.add_row("in", f"{window['prompt_tokens_per_s']:,.0f}", "tokens/s")
    middle.add_row("ended", f"{window['requests']}", f"in {window['seconds']:g} s{failed}")
    right = Table.grid(padding=gap)
    right.add_row("", *(Text(name, "dim") for name in ("p50", "p90", "p99")))
    for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s")):
        right.add_row(label, *(_ms(window[name], p) for p in ("p50", "p90", "p99")))
    row = Table.grid(padding=(0, 4 if is_wide else 2, 0, 0))
    row.add_row(left, middle, right)
    each = window.get("output_tokens_each_s") or ()
    return Group(row, Text(sparkline(each), "green")) if any(each) else row


def _workers(view: Mapping[str, Any], width: int) -> RenderableType:
    if not view["workers"]:
        return Text("none has joined", "dim")
    is_wide = width >= WIDE
    table = Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), header_style="dim")
    for name in ("role", "address", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "tokens", "step") if is_wide else ("run", "wait", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    legend = Text("blocks ")
    for state, (mark, style) in BLOCK_STYLES.items() if is_wide else ():
        legend.append(mark, style).append(f" {state} ")
    table.add_column(legend, no_wrap=True)
    if is_wide:
        table.add_column("pairs", justify="right", no_wrap=True)
    bar_width = min(BAR_WIDTH, max(8, width - 71))
    for worker in view["workers"]:
        blocks = worker["blocks"]
        taken = blocks["total"] - blocks["free"]
        count = Text(f" {taken:,} of {blocks['total']:,}", "dim")
        if not is_wide:
            count = Text(f" {taken / max(1, blocks['total']):.0%}", "dim")
        elif blocks["quarantined"]:
            count.append(f", {blocks['quarantined']} in quarantine", "red")
        is_colocated = worker["incarnation"] in worker["paired"]
        pairs = str(len(worker["paired"])) if worker["role"] == "prefill" else ""
        tokens = f"{worker['pending_tokens']:,}"
        table.add_row(
            "colocated" if is_colocated else worker["role"],
            worker["address"],
            Text(worker["state"], STATE_STYLES.get(worker["state"], "red")),
            str(worker["running"]),
            str(worker["waiting"]),
            *([tokens] if is_wide else []),
            f"{worker['step_s'] * 1000:.1f} ms",
            block_bar(blocks, bar_width).append_text(count),
            *([pairs] if is_wide else []),
        )
    return table


def _transfers(view: Mapping[str, Any], is_wide: bool) -> RenderableType:
    if not view["transfers"]:
        return Text("none", "dim")
    addresses = {worker["incarnation"]: worker["address"] for worker in view["workers"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("prefill → decode", "lane"):
        table.add_column(name, no_wrap=True)
    names = ("count", "size", "rate p50", "p10", "exposed p50", "p99")
    for name in names if is_wide else ("rate p50", "exposed p50"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in view["transfers"]:
        ends = [addresses.get(pair[role], f"{pair[role]} (gone)") for role in ("prefill", "decode")]
        rate: Mapping[str, float] = pair["gb_per_s"] or {}
        exposed = _ms(pair["exposed_s"], "p50")
        cells = [_rate(rate.get("p50")), exposed]
        if is_wide:
            cells = [
                f"{pair['count']:,}",
                _size(pair["bytes"]),
                _rate(rate.get("p50")),
                _rate(rate.get("p10")),
                exposed,
                _ms(pair["exposed_s"], "p99"),
            ]
        table.add_row(" → ".join(ends), pair["lane"] or "?", *cells)
    return table


def _ms(percentiles: Mapping[str, float] | None, name: str) -> str:
    if not percentiles:
        return "-"
    milliseconds = percentiles[name] * 1000
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return "-"
    return f"{gb_per_s:.1f} GB/s" if gb_per_s >= 1 else f"{gb_per_s * 1000:.0f} MB/s"


def _size(count: int) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"up {seconds:.0f} s"
    return f"up {seconds / 60:.0f} min" if seconds < 7200 else f"up {seconds / 3600:.0f} h"
