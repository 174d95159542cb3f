"""Is a live mesh what the simulator says of it?

    python -m bench.simulator.live [--engines fake,demo] [--meshes 1P+1D,2P+2D,1M] [--loads 0.2,0.4]

Starts meshes with ``pdmesh up``, loads them with ``pdmesh bench``, and holds each run against
``pdmesh plan verify``, which is all of the comparison. Prints one row a run. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from bench.record import Record
from services.planner.core.mesh_text import read_mesh
from tests.support.command import pdmesh

HERE = Path(__file__).parent
STEP_S = 0.1
"""Of the real-time fake engine: long beside what HTTP and loops take."""

ENGINES: dict[str, tuple[tuple[str, ...], dict[str, str], float]] = {
    "fake": (("--engine", "fake", "--device", "cpu"), {"PDMESH_FAKE_STEP_S": str(STEP_S)}, 10.0),
    "demo": (("--device", "cpu"), {}, 10.0),
}
"""Flags, variables, and the requests a second that count as a load of 1."""

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
    engine: str, mesh: str, loads: list[float], requests: int
) -> list[dict[str, Any]]:
    """Return one row for each load of one mesh."""
    flags, variables, most_rate = ENGINES[engine]
    rows: list[dict[str, Any]] = []
    up = pdmesh("up", *flags, *workers(mesh), "--port", "0", limit_s=LIMIT_S, **variables)
    async with up as process:
        url = await process.url()
        for load in loads:
            rate, began_at = load * most_rate, asyncio.get_running_loop().time()
            await told("bench", url, *LOAD, "--rate", str(rate), "--requests", str(requests))
            # What is older than the run's own requests is another load's.
            last = f"{asyncio.get_running_loop().time() - began_at:.0f}s"
            facts = json.loads(await told("plan", "verify", "--url", url, "--last", last, "--json"))
            row = {"engine": engine, "mesh": mesh, "rate": rate, **facts}
            rows.append(row)
            errors = ", ".join(
                f"{it['name']} {it['error']:+.1%}{'' if it['is_kept'] else ' (beyond its bar)'}"
                for it in facts["figures"]
            )
            worst = [f"{of} {name}" for of, name in facts["worst"].items() if name]
            off = f"; off most: {', '.join(worst)}" if worst else ""
            print(f"{engine:5} {facts['mesh']:6} {rate:4.1f}/s  {errors}{off}", flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", default="fake,demo")
    parser.add_argument("--meshes", default="1P+1D,2P+2D,1M")
    parser.add_argument("--loads", default="0.1,0.2,0.4")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="write results/")
    asked = parser.parse_args()
    record = Record(HERE, is_quick=not asked.record)
    loads = [float(load) for load in asked.loads.split(",")]
    for engine in asked.engines.split(","):
        for mesh in asked.meshes.split(","):
            record.rows += asyncio.run(measure(engine, mesh, loads, asked.requests))
    record.finish(write=asked.record)


if __name__ == "__main__":
    main()
