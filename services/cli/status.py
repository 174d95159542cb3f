"""How a command shows the processes of a local mesh: a live table on a terminal, else a line a
change."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.local import LocalMesh, Phase, Service, last_word
from shared.unblocked import UnblockedText

COLORS = {
    Phase.WAITING: "dim",
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.CRASHED: "red",
    Phase.STOPPING: "yellow",
    Phase.STOPPED: "dim",
}

FACTS = {
    "http_port": "HTTP {}",
    "grpc_port": "gRPC {}",
    "mesh_port": "mesh {}",
    "num_blocks": "{} KV blocks",
}


def unblocked_console() -> Console:
    """Return the console of a command that serves meanwhile: whoever does not read it, or has left,
    holds up nothing."""
    out = cast("IO[str]", UnblockedText(sys.stdout))
    return Console(file=out, highlight=False, markup=False)


@contextlib.contextmanager
def status_view(console: Console, *, is_transient: bool = False) -> Generator[LineView | LiveView]:
    """Show what suits the console for the length of the block.

    is_transient: the table goes away at the end.
    """
    if not console.is_terminal:
        yield LineView(console)
        return
    view = LiveView(console, is_transient)
    view.live.start()
    try:
        yield view
    finally:
        view.live.stop()


class LineView:
    """One line at every change of a process; for logs, pipes and containers."""

    def __init__(self, console: Console) -> None:
        self._out = console.file
        self._last: dict[str, tuple[Phase, int, str]] = {}

    def show(self, mesh: LocalMesh) -> None:
        for service in mesh.services:
            now = service.phase, service.num_restarts, service.part
            if service.phase is not Phase.WAITING and self._last.get(service.name) != now:
                self._last[service.name] = now
                self.say(f"{service.name:<10} {service.phase.value:<9} {_facts(service)}".rstrip())

    def say(self, text: str) -> None:
        self._out.write(f"{text}\n")


class LiveView:
    def __init__(self, console: Console, is_transient: bool) -> None:
        self._console = console
        self._mesh: LocalMesh | None = None
        self._since: dict[str, tuple[Phase, float]] = {}
        self.live = Live(
            get_renderable=self._table,
            console=console,
            refresh_per_second=8,
            transient=is_transient,
        )

    def show(self, mesh: LocalMesh) -> None:
        self._mesh = mesh
        for service in mesh.services:
            if self._since.get(service.name, (None,))[0] is not service.phase:
                self._since[service.name] = service.phase, time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for service in self._mesh.services if self._mesh is not None else ():
            # One that the planner has just added is shown by rich's thread before we hear of it.
            phase, since = self._since.get(service.name, (service.phase, time.monotonic()))
            style = COLORS[phase]
            state = Text(phase.value, style=style)
            for_s = ""
            if phase in (Phase.STARTING, Phase.STOPPING):
                state = Spinner("dots", text=state, style=style)
                for_s = f"{time.monotonic() - since:.0f} s"
            table.add_row(service.name, state, Text(_facts(service), style="dim"), for_s)
        return table


def _facts(service: Service) -> str:
    parts: list[str] = []
    if service.phase is Phase.CRASHED:
        parts.append(last_word(service))
    elif service.phase not in (Phase.WAITING, Phase.STOPPED):
        parts.append(f"pid {service.pid}")
    if service.phase is Phase.STARTING and service.part:
        parts.append(service.part)
    if service.phase is Phase.READY:
        facts = service.facts
        parts += [text.format(facts[name]) for name, text in FACTS.items() if name in facts]
    if service.num_restarts:
        parts.append(
            "1 restart" if service.num_restarts == 1 else f"{service.num_restarts} restarts"
        )
    return ", ".join(parts)
