"""Quantities as people read them, and JSON as programs do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import orjson
from rich.console import Console
from rich.table import Table

_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def print_json(value: Any) -> None:
    """Print it for programs; what JSON does not know as text."""
    print(orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2).decode())


def plain_console(width: int = 160) -> Console:
    """Return the console of results: as wide as the terminal, or as a page that nobody's window
    holds."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, each as one line however long."""
    console = plain_console()
    for line in lines:
        console.print(line, soft_wrap=True)


def plain_table(*heads: str, left: str | None = None) -> Table:
    """Return a table without frames, of numbers. left: the column of words."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == left else "right")
    return table


def milliseconds(seconds: float | None) -> str:
    """Return a latency; '-' for none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def uptime(seconds: float) -> str:
    """Return how long something has been up."""
    if seconds < 120:
        return f"up {seconds:.0f} s"
    return f"up {seconds / 60:.0f} min" if seconds < 7200 else f"up {seconds / 3600:.0f} h"


def size(count: int) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def speed(gb_per_s: float) -> str:
    if gb_per_s >= 1:
        return f"{gb_per_s:.1f} GB/s"
    mb_per_s = gb_per_s * 1000
    return f"{mb_per_s:.0f} MB/s" if mb_per_s >= 10 else f"{mb_per_s:.2g} MB/s"
