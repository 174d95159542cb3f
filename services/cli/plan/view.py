"""How plans are shown: tables, progress where somebody looks, and the end by Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.cli.words import print_json
from services.planner.core.paper_table import PaperTable
from shared.errors import InvalidRequest

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
SHORT_S: Final = 45.0
"""No word is said of what takes less."""

PLAIN_WIDTH: Final = 160
"""Where nobody's window says how wide."""


P = ParamSpec("P")


def interruptible(command: Callable[P, int]) -> Callable[P, int]:
    """Let Ctrl-C end a command that computes and has nothing to show yet: with a word, and 130."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            print("pdmesh: interrupted, with nothing to show yet", file=sys.stderr)
            return EXIT_INTERRUPTED

    return run


def plain_console() -> Console:
    """Return the console of results: as wide as the terminal, or as a page."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def show_tables(tables: Iterable[PaperTable], *, as_json: bool = False) -> None:
    """Print papers' tables, ours beside theirs."""
    found = list(tables)
    if as_json:
        rows = [dataclasses.asdict(table) for table in found]
        print_json(rows)
        return
    console = plain_console()
    for paper in found:
        table = Table(title=paper.title, title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("theirs", justify="right")
        table.add_column("ours", justify="right")
        table.add_column("what differs and why")
        for row in paper.rows:
            table.add_row(row.what, row.theirs or "–", row.ours_text, row.why)
        console.print(table)
        for note in paper.notes:
            console.print(note)
        console.print()


@contextlib.contextmanager
def progress(title: str, total: int) -> Generator[Callable[[int], None]]:
    """Show how far something long has come, where somebody looks, with the time that is left."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def require_writable(flag: str, path: Path) -> None:
    """See to it, before anything is computed, that a file can be written there.

    Raises InvalidRequest.
    """
    folder = path.parent
    for is_wrong, why in (
        (path.is_dir(), "is a folder"),
        (not folder.is_dir(), "there is no such folder"),
        (not os.access(folder, os.W_OK), "permission denied"),
    ):
        if is_wrong:
            raise InvalidRequest(f"{flag} {path}: {why}")


def write_result(path: Path, text: str) -> None:
    """Write a result file, whole or not at all. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def say_how_long(num_runs: int, run_s: float, shorter: str) -> None:
    """Say before a long search how long it may take, and what shortens it. run_s: of one run."""
    most_s = num_runs * run_s
    if most_s < SHORT_S:
        return
    text = f"{most_s / 3600:.1f} hours" if most_s >= 3600 else f"{max(1, round(most_s / 60))} min"
    Console(stderr=True, highlight=False).print(
        f"at most {num_runs} simulations, about {text}: {shorter}; Ctrl-C keeps what was found",
        soft_wrap=True,
    )


def say_interrupted(*, is_whole: bool) -> None:
    """Say after what was found that Ctrl-C came before its end."""
    if not is_whole:
        print("pdmesh: interrupted: this is what was found", file=sys.stderr)


def counted(on_progress: Callable[[int], None]) -> Callable[[], None]:
    """Return what is to be called after each part of something long."""
    done = itertools.count(1)
    return lambda: on_progress(next(done))
