"""``pdmesh tour``: the life of one real request, told by the three processes that it visits.

Starts a mesh with the bundled model and logs at debug level, asks one question, and puts the log
lines of that request (``shared/telemetry/moments.py``) in the order of time. What each stop means
and where its code is: ``tour_stops.py``.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.demo import DEMO, EXPECTED, PROMPT, ask, log_kept_on_failure
from services.cli.generate import Answer
from services.cli.interrupts import Interrupts
from services.cli.receipt import receipt_table
from services.cli.tour_stops import ROOT, STOPS, Stop, place_of
from services.cli.up import OPEN_DOORS, PAIR_WITHIN_S, plan_mesh
from services.cli.words import plain_console
from services.local import LocalMesh, Service, local_mesh, wait_for_pair
from shared.errors import InvariantViolated

STEP_TOKENS: Final = 96
"""Small steps, so that the prompt takes more than one."""

SETTINGS: Final = {
    "PDMESH_GROUP_KIB": "1",  # a frame a layer
    "PDMESH_LOG_FORMAT": "json",
    **OPEN_DOORS,
}
WARM_UP: Final = "Hello!"
"""The first request of a process pays for its threads and buffers; it is not the one that is
shown."""

COLORS: Final = {"gateway": "cyan", "prefill": "yellow", "decode": "green"}

INTRO: Final = (
    "One request, three processes, the bundled model. Times count from its arrival, by the one "
    "clock of this machine. Steps of {tokens} tokens and frames of one layer, so that there is "
    "something to see; another request before it has warmed the mesh up.\n"
)


@dataclass(frozen=True, slots=True)
class Happening:
    """One stop in one run. process: who told it. at_s: since arrival. number, count: which
    occurrence of how many."""

    stop: Stop
    process: str
    at_s: float
    facts: str
    number: int
    count: int


Walk = tuple[tuple[Happening, ...], Answer]
"""One request's whole walk, in order of time, and its answer."""


def tour() -> int:
    """Follow one real request through three real processes: when, what, and where the code is.

    Starts a mesh on free ports with the bundled model, needs no network, and leaves nothing behind.
    Every stop names the core that decides and the shell that acts, as file:line of this
    installation.
    """
    console = plain_console(120)
    interrupts = Interrupts()

    def change(mesh: LocalMesh) -> None:
        interrupts.at_once = mesh.kill

    async def main(log: Path) -> None:
        show(await walk(log, change), console)

    console.print("starting a gateway, a prefill worker and a decode worker\n")
    with log_kept_on_failure("tour", console) as log:
        return interrupts.run(lambda: main(log))


async def walk(log: Path, on_change: Callable[[LocalMesh], None] = lambda mesh: None) -> Walk:
    """Run the mesh, ask, and collect what was logged of the request.

    log: an empty file for the services' logs. on_change: see ``local_mesh``.
    Raises CannotRun: the answer was wrong. MeshError: see ``local_mesh``.
    """
    mesh_block = local_mesh(_services(), log=log, restart=False, drain_s=5, on_change=on_change)
    async with mesh_block as mesh:
        await wait_for_pair(mesh.http_url, PAIR_WITHIN_S)
        await ask(mesh.http_url, WARM_UP)
        answer = await ask(mesh.http_url, PROMPT, EXPECTED)
    # Read after the end of the mesh, so that the last release is in it.
    return happenings(_lines_of(log)), answer


def _services() -> list[Service]:
    small = dataclasses.replace(
        DEMO, token_budget=STEP_TOKENS, transfer_mode="layerwise", log_level="debug"
    )
    services = plan_mesh(small, os.environ).services
    for service in services:
        service.env |= SETTINGS
    return services


def _lines_of(log: Path) -> list[dict[str, Any]]:
    # All that the processes print is in it; records are the lines that are objects.
    return [orjson.loads(line) for line in log.read_bytes().splitlines() if line[:1] == b"{"]


def happenings(lines: Sequence[dict[str, Any]]) -> tuple[Happening, ...]:
    """Return the last request's moments in order of time.

    Raises InvariantViolated: the lines tell of no request.
    """
    stops = {stop.moment.value: stop for stop in STOPS}
    moments = [line for line in lines if "at_s" in line and line["event"] in stops]
    arrivals = [line for line in moments if line["event"] == STOPS[0].moment.value]
    if not arrivals:
        raise InvariantViolated("no process has logged a moment of a request")
    last = max(arrivals, key=lambda line: line["at_s"])
    ours = [line for line in moments if line["request_id"] == last["request_id"]]
    ours.sort(key=lambda line: line["at_s"])
    counts = Counter(line["event"] for line in ours)
    seen: Counter[str] = Counter()
    found: list[Happening] = []
    for line in ours:
        event = line["event"]
        seen[event] += 1
        stop = stops[event]
        at_s = line["at_s"] - last["at_s"]
        facts = stop.facts.format_map(line)
        found.append(Happening(stop, line["service"], at_s, facts, seen[event], counts[event]))
    return tuple(found)


def show(walked: Walk, console: Console) -> None:
    """Print a walk: on a terminal with colours and links, else as plain text."""
    found, answer = walked
    console.print(INTRO.format(tokens=STEP_TOKENS))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for happening in found:
        stop = happening.stop
        if stop.each or happening.number in (1, happening.count):
            time = Text(f"{happening.at_s * 1000:.2f} ms", "bold")
            process = Text(happening.process, COLORS.get(happening.process, ""))
            table.add_row(time, process, stop.phase, _telling(happening))
    console.print(table)
    console.print(f"\nanswer: {answer.text}\n")
    console.print(receipt_table(answer.receipt, answer.usage))
    console.print("\nThe same walk as a page to read: docs/tour.md", style="dim")


def _telling(happening: Happening) -> Text:
    """The sentence and the places at a stop's first occurrence, what is new at a later one."""
    stop, facts = happening.stop, happening.facts
    if happening.number > 1:
        return Text(f"… {facts}" if stop.each else f"… {facts}: {happening.count} in all", "dim")
    text = Text(stop.text)
    if facts:
        text.append(f" ({facts})", "dim")
    for what, name in (("decides", stop.decides), ("acts", stop.acts)):
        file, line = place_of(name)
        text.append(f"\n{what:<7} ", "dim italic")
        text.append(f"{file}:{line}", f"dim link file://{ROOT / file}")
    return text
