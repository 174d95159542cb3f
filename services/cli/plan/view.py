"""How plans are shown: tables, progress where somebody looks, and what Ctrl-C leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.flags import CannotRun
from services.cli.interrupts import EXIT_INTERRUPTED
from services.cli.words import plain_console, plain_table, print_json
from services.planner.core.paper_table import PaperTable
from shared.errors import InvalidRequest
from shared.runtime.service import EXIT_FAILED, EXIT_OK
from shared.whole_file import write_whole

SHORT_S: Final = 45.0
"""No word is said of what takes less."""


class Kept:
    """What a search finds is kept: Ctrl-C ends the block and not the command."""

    is_whole = True

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        is_interrupted = kind is KeyboardInterrupt
        self.is_whole = self.is_whole and not is_interrupted
        return is_interrupted

    def exit_code(self, *, is_good: bool = True) -> int:
        """Say, after what was found, whether Ctrl-C came before its end."""
        if not self.is_whole:
            print("pdmesh: interrupted: this is what was found", file=sys.stderr)
            return EXIT_INTERRUPTED
        return EXIT_OK if is_good else EXIT_FAILED


def show_tables(tables: Iterable[PaperTable], *, as_json: bool = False) -> None:
    """Print papers' tables, ours beside theirs."""
    if as_json:
        print_json([*tables])
        return
    console = plain_console()
    for paper in tables:
        console.print(paper.title, style="italic", soft_wrap=True)
        words = ("", "what differs and why")
        table = plain_table("", "theirs", "ours", words[1], left=words)
        for row in paper.rows:
            table.add_row(row.what, row.theirs or "–", row.ours_text, row.why)
        console.print(table)
        console.print(*paper.notes, "", sep="\n")


@contextlib.contextmanager
def progress(title: str, total: int) -> Generator[Callable[..., None]]:
    """Show how far something long has come, with the time that is left: in a bar where somebody
    looks, else in a line, each time that it has taken twice as long.

    What is yielded is told how many parts are done, or with nothing, that one more is.
    """
    console = plain_console(stderr=True)
    began, num, next_s = time.monotonic(), 0, SHORT_S

    def tell(done: int | None = None) -> None:
        nonlocal num, next_s
        num, took_s = num + 1 if done is None else done, time.monotonic() - began
        if took_s > next_s and 0 < num < total:
            next_s = 2 * took_s
            left = _about(took_s / num * (total - num))
            console.print(f"{title}: {num} of {total}, {left} more", soft_wrap=True)

    if not console.is_terminal:
        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(done: int | None = None) -> None:
            bar.update(task, advance=1, completed=done)

        yield advance


def require_ranges(*flags: tuple[str, bool, str]) -> None:
    """Raise InvalidRequest, with what is allowed, for the first flag that is not right."""
    for flag, is_right, rule in flags:
        if not is_right:
            raise InvalidRequest(f"{flag} must be {rule}")


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


def write_output(flag: str, path: Path, content: bytes) -> None:
    """Write what a command was asked to write, whole or not at all. Raises CannotRun."""
    try:
        write_whole(path, content)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CannotRun(f"cannot write to {flag} {path} ({reason})") from None


def say_how_long(num_runs: int, run_s: float, shorter: str) -> None:
    """Say before a long search how long it may take, and what shortens it. run_s: of one run."""
    most_s = num_runs * run_s
    if most_s < SHORT_S:
        return
    num = "one simulation" if num_runs == 1 else f"at most {num_runs} simulations"
    plain_console(stderr=True).print(
        f"{num}, {_about(most_s)}: {shorter}; Ctrl-C keeps what was found",
        soft_wrap=True,
    )


def _about(seconds: float) -> str:
    minutes = f"{max(1, round(seconds / 60))} min"
    return f"about {seconds / 3600:.1f} hours" if seconds >= 3600 else f"about {minutes}"
