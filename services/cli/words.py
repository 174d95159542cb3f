"""Quantities as people read them, and JSON as programs do."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from rich.console import Console  # not for services, which draw nothing
    from rich.table import Table

_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def print_json(value: Any) -> None:
    print(orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2).decode())


def plain_console(width: int = 160, *, stderr: bool = False) -> Console:
    """Return the console of results, or of words beside them: as wide as the terminal, or as a page
    that nobody's window holds. Brackets in names, paths and addresses are no markup."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, each as one line however long."""
    console = plain_console()
    for line in lines:
        console.print(line, soft_wrap=True)


def plain_table(*heads: str, left: Collection[str] = ()) -> Table:
    """Return a table without frames, of numbers. left: the columns of words."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    return table


def milliseconds(seconds: float | None) -> str:
    """Return a latency; '-' for none."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def uptime(seconds: float) -> str:
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


def terms_text(terms: Mapping[str, Any] | None) -> str:
    """Say what a score is the sum of, as decisions' records and receipts have it."""
    if terms is None:
        return ""
    how = ", by its load alone" if terms.get("by_load") else ""
    if "step" in terms:
        more = (("no room", terms["no_room"]), ("hand-over", terms["hand_over"]))
        rest = "".join(f" + {name} {seconds:.3g}" for name, seconds in more if seconds)
        return f" = step {terms['step']:.3g}{rest} s a token{how}"
    unit = "s" if terms["is_s"] else "tokens"
    own = terms["cached_tokens"] - terms["fetched_tokens"]
    cached = f", {own:,} tokens cached" if own else ""
    wait = f"wait {terms['wait']:.3g}"
    if terms["source"]:
        fetched, source = f"{terms['fetched_tokens']:,} tokens", terms["source"]
        wait = f"the longer of {wait} and fetch {terms['fetch']:.3g} ({fetched} from {source})"
    elif loaded := terms.get("loaded_tokens"):
        unknown = "" if terms["load"] else ", at a speed that it does not report"
        lies = f"{loaded:,} tokens from below its pool{unknown}"
        wait = f"the longer of {wait} and load {terms['load']:.3g} ({lies})"
    return f" = {wait} + compute {terms['compute']:.3g} {unit}{cached}{how}"
