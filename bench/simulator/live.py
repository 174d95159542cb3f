"""Is a live mesh what the simulator says of it?

    python -m bench.simulator.live [--quick] [--engines fake demo 87m] [--meshes 1P+1D 2P+2D 1M]

Starts meshes with ``pdmesh up``, loads them with ``pdmesh bench``, and holds each run against
``pdmesh plan verify``, which is all of the comparison. Prints one row a run. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.disaggregation.run import make_model
from bench.record import Record, arguments
from services.planner.core.mesh_text import read_mesh
from tests.support.command import pdmesh

STEP_S = 0.1
"""Of the real-time fake engine: long beside what HTTP and loops take."""

FAKE_BAR = 0.03
"""What medians and 99th percentiles may be off by where a step's time is known exactly."""


class Engine(NamedTuple):
    """What ``pdmesh up`` is given. full_rate: the requests a second that count as a load of 1."""

    flags: tuple[str, ...]
    variables: dict[str, str]
    full_rate: float


ENGINES = {
    "fake": Engine(("--engine", "fake"), {"PDMESH_FAKE_STEP_S": str(STEP_S)}, 10.0),
    "demo": Engine((), {}, 10.0),
    "87m": Engine((), {}, 4.0),
}
"""87m: the transformer of bench/engine's 125 M parameters with the demo model's small vocabulary,
made in a folder of its own."""

MESHES = ["1P+1D", "2P+2D", "1M"]
LOADS = [0.1, 0.2, 0.3, 0.4, 0.5]
LIMIT_S = 300.0
LOAD = ("--synthetic", "fixed", "--input-len", "128", "--output-len", "16")


async def told(*arguments: str) -> str:
    """Run a command to its end; what it printed."""
    async with pdmesh(*arguments, limit_s=LIMIT_S) as command:
        await command.ended()
        if not command.out:
            raise SystemExit(command.err)
        return command.out


def workers(mesh: str) -> tuple[str, ...]:
    """Return the flags of ``pdmesh up`` for a mesh."""
    shape = read_mesh(mesh)
    if shape.num_of("M"):
        return ("--colocated", str(shape.num_of("M")))
    return ("--prefill", str(shape.num_of("P")), "--decode", str(shape.num_of("D")))


async def measure(
    name: str, mesh: str, loads: list[float], requests: int, folder: Path
) -> list[dict[str, Any]]:
    """Return one row for each load of one mesh. folder: of a made model."""
    engine, rows = ENGINES[name], list[dict[str, Any]]()
    flags = [*engine.flags, "--device", "cpu", *workers(mesh), "--port", "0"]
    if name == "87m":
        flags += ["--model", str(folder)]
    async with pdmesh("up", *flags, limit_s=2 * LIMIT_S, **engine.variables) as process:
        url = await process.url()
        for load in loads:
            rate, began_at = load * engine.full_rate, asyncio.get_running_loop().time()
            await told("bench", url, *LOAD, "--rate", str(rate), "--requests", str(requests))
            # What is older than the run's own requests is another load's.
            last = f"{asyncio.get_running_loop().time() - began_at:.0f}s"
            facts = json.loads(await told("plan", "verify", "--url", url, "--last", last, "--json"))
            row = {"engine": name, "mesh": mesh, "rate": rate, **facts}
            rows.append(row)
            errors = ", ".join(
                f"{it['name']} {it['error']:+.1%}{'' if it['is_kept'] else ' (beyond its bar)'}"
                for it in facts["figures"]
            )
            worst = [f"{of} {term}" for of, term in facts["worst"].items() if term]
            off = f"; off most: {', '.join(worst)}" if worst else ""
            print(f"{name:5} {facts['mesh']:6} {rate:4.1f}/s  {errors}{off}", flush=True)
    return rows


def note_goals(record: Record) -> None:
    """Of each engine, mesh and figure: the rate at which it is off most."""
    most: dict[tuple[str, str, str], tuple[float, float]] = {}
    for row in record.rows:
        for it in row["figures"]:
            is_time = it["name"] != "attainment"
            bar = FAKE_BAR if row["engine"] == "fake" and is_time else it["bar"]
            key = row["engine"], row["mesh"], it["name"]
            most[key] = max(most.get(key, (0.0, bar)), (abs(it["error"]), bar))
    for (engine, mesh, name), (error, bar) in most.items():
        record.goal(20, f"{engine}, {mesh}: {name} off by at most", error, "<=", bar)


def main() -> None:
    parser = arguments(__doc__, "one short run, prints only")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES))
    parser.add_argument("--meshes", nargs="+")
    parser.add_argument("--loads", nargs="+", type=float)
    parser.add_argument("--requests", type=int)
    parser.set_defaults(engines=list(ENGINES), meshes=MESHES, loads=LOADS, requests=60)
    asked = parser.parse_args()
    if asked.quick:
        parser.set_defaults(engines=["fake"], meshes=["1P+1D"], loads=[0.4], requests=20)
        asked = parser.parse_args()
    record = Record.of(__file__, asked)
    with tempfile.TemporaryDirectory() as folder:
        if "87m" in asked.engines:
            make_model(Path(folder))
        for engine in asked.engines:
            for mesh in asked.meshes:
                measured = measure(engine, mesh, asked.loads, asked.requests, Path(folder))
                for row in asyncio.run(measured):
                    record.add(row)
    note_goals(record)
    record.finish()


if __name__ == "__main__":
    main()
