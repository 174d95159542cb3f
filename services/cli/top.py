"""``pdmesh top``: a running gateway's mesh, live on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Generator
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.client import LOCAL_GATEWAY, RunningGateway, told_otherwise
from services.cli.flags import require
from services.cli.interrupts import EXIT_INTERRUPTED, run_interruptible
from services.cli.sources import OUTPUT, QUIET, JsonFlag
from services.cli.top_view import frame
from services.cli.words import plain_console, print_json
from shared.errors import MeshError
from shared.runtime.service import EXIT_OK

ANSWERS_WITHIN_S: Final = 5.0
SHORTEST_INTERVAL_S: Final = 0.1
LONGEST_INTERVAL_S: Final = 3600.0
LEAVE_KEYS: Final = b"qQ\x04"
"""q and Ctrl-D; Escape, too, by itself: arrows, and a wheel that is turned, begin with it."""

_OUTPUT: Final = Parameter(group=OUTPUT)


def top(
    *,
    interval: Annotated[float, _OUTPUT] = 1.0,
    once: Annotated[bool, QUIET, _OUTPUT] = False,
    as_json: JsonFlag = False,
    gateway: RunningGateway = LOCAL_GATEWAY,
) -> int:
    """Watch a mesh: workers, their KV blocks, the queue, tokens/s, latencies, transfers.

    q or Ctrl-C leaves. Without a terminal, or with --once, one frame is printed; with --json the
    gateway's own words. A gateway that goes away is waited for. Rates and percentiles are those of
    the last minute.

    Parameters
    ----------
    interval
        Seconds between two looks.
    once
        Print one frame and end.
    """
    require(
        SHORTEST_INTERVAL_S <= interval <= LONGEST_INTERVAL_S,
        f"--interval must be {SHORTEST_INTERVAL_S:g}..{LONGEST_INTERVAL_S:g} seconds",
    )
    console = plain_console(140)
    if once or as_json or not console.is_terminal:
        return run_interruptible(lambda: _print_once(gateway, as_json, console))
    code = run_interruptible(lambda: _watch(gateway, interval, console))
    return EXIT_OK if code == EXIT_INTERRUPTED else code


async def _print_once(gateway: RunningGateway, as_json: bool, console: Console) -> None:
    view = await gateway.ask("/cluster", limit_s=ANSWERS_WITHIN_S)
    if as_json:
        print_json(view)
    else:
        console.print(_frame(gateway.url, view, width=console.width))


def _frame(url: str, view: Any, trouble: str = "", *, width: int) -> RenderableType:
    """``frame``. Raises CannotRun: the view is that of another release."""
    try:
        return frame(url, view, trouble, width=width)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise told_otherwise(url, view) from None


async def _watch(gateway: RunningGateway, interval_s: float, console: Console) -> None:
    leave = asyncio.Event()
    view: Any = None
    async with gateway.access.session() as session:
        with leaving_keys(leave), Live(console=console, screen=True, auto_refresh=False) as live:
            while not leave.is_set():
                trouble = ""
                try:
                    view = await gateway.call(session, "/cluster", limit_s=ANSWERS_WITHIN_S)
                except MeshError as error:
                    trouble = error.message
                shown = _frame(gateway.url, view, trouble, width=console.width)
                live.update(shown, refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await leave.wait()


@contextlib.contextmanager
def leaving_keys(leave: asyncio.Event) -> Generator[None]:
    """Set ``leave`` when a key that leaves is pressed; keys are neither echoed nor waited for."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = b""  # of a terminal that has hung up
        with contextlib.suppress(OSError):
            keys = os.read(keyboard, 64)
        if keys in (b"", b"\x1b") or (
            keys[:1] != b"\x1b" and any(key in LEAVE_KEYS for key in keys)
        ):
            leave.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        with contextlib.suppress(termios.error):  # likewise
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
