"""Is the mesh that the planner chooses the best of those that can be tried?

    python -m bench.simulator.choice [--quick] [--meshes 1P+1D 2P+1D 1P+2D 1M 2M] [--seeds 1 2]

Three workloads, each a trace file: ``pdmesh plan compare`` chooses among the meshes by it, and
``pdmesh bench`` loads every one of them with it, live. What the numbers mean: README.md beside this
file.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import Record, arguments
from bench.simulator.live import LIMIT_S, told, workers
from tests.support.command import pdmesh

GOAL = 20
STEP_S = 0.05
MAX_RUNNING, TOKEN_BUDGET = 8, 128
POLICY = "least_loaded"
SLO = ("--slo-ttft", "1s", "--slo-tpot", "120ms")
SHARE = 0.95
"""Of what the best mesh attains."""

MESHES = ("1P+1D", "2P+1D", "1P+2D", "1M", "2M")


class Workload(NamedTuple):
    """lengths: draws prompt and answer, tokens. rate: requests/s at which meshes differ."""

    lengths: Callable[[random.Random], tuple[int, int]]
    rate: float


def _talk(draws: random.Random) -> tuple[int, int]:
    prompt, answer = draws.lognormvariate(4.6, 0.8), draws.lognormvariate(2.8, 0.7)
    return min(600, 8 + int(prompt)), min(64, 2 + int(answer))


WORKLOADS = {
    "prompts": Workload(lambda _: (512, 8), 10.0),
    "answers": Workload(lambda _: (64, 48), 5.0),
    "talk": Workload(_talk, 9.0),
}


def trace(name: str, seed: int, requests: int) -> Iterator[str]:
    """Yield the lines of Mooncake's format: Poisson, and no two prompts begin alike."""
    workload, draws, at = WORKLOADS[name], random.Random(seed), 0.0
    for number in range(requests):
        at += draws.expovariate(workload.rate)
        prompt, answer = workload.lengths(draws)
        line = {"timestamp": int(at * 1000), "input_length": prompt, "output_length": answer}
        yield json.dumps({**line, "hash_ids": [2 * number, 2 * number + 1]})


async def plan(meshes: list[str], name: str, file: Path) -> dict[str, float]:
    """Return the share that the planner expects of each mesh, best first."""
    step = ("--base", f"{STEP_S * 1000:g}ms")
    free = [
        word
        for of in ("prompt-token", "decode-row", "context-token")
        for word in (f"--{of}", "0us")
    ]
    limits = ("--token-budget", str(TOKEN_BUDGET), "--max-running", str(MAX_RUNNING))
    limits += ("--policy", POLICY)
    load = ("--workload", str(file), "--rate", str(WORKLOADS[name].rate))
    words = (
        "plan",
        "compare",
        *meshes,
        *step,
        *free,
        *limits,
        *load,
        *SLO,
        "--no-what-if",
        "--json",
    )
    return {one["mesh"]: one["attainment"] for one in json.loads(await told(*words))}


async def measure(
    mesh: str, files: dict[tuple[str, int], Path], folder: Path
) -> list[dict[str, Any]]:
    """Return one row for each trace: what a live mesh attains."""
    settings = folder / "mesh.toml"
    settings.write_text(
        f"[mesh]\ntoken_budget = {TOKEN_BUDGET}\n"
        f"[prefill]\nmax_running = {MAX_RUNNING}\n[decode]\nmax_running = {MAX_RUNNING}\n"
    )
    flags = ["--engine", "fake", "--device", "cpu", *workers(mesh), "--port", "0"]
    flags += ["--config", str(settings), "--policy", POLICY]
    rows: list[dict[str, Any]] = []
    variables = {"PDMESH_FAKE_STEP_S": str(STEP_S)}
    async with pdmesh("up", *flags, limit_s=3 * LIMIT_S, **variables) as process:
        url = await process.url()
        for (name, seed), file in files.items():
            load = ("--trace", str(file), "--rate", str(WORKLOADS[name].rate))
            report = json.loads(await told("bench", url, *load, *SLO, "--json"))
            (run,) = report["runs"]
            rows.append({"mesh": mesh, "workload": name, "seed": seed, "live": run["attainment"]})
            print(f"{mesh:6} {name:8} {run['attainment']:6.1%}", flush=True)
    return rows


async def ask(meshes: list[str], seeds: list[int], requests: int, record: Record) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files: dict[tuple[str, int], Path] = {}
        for name in WORKLOADS:
            for seed in seeds:
                file = files[name, seed] = folder / f"{name}-{seed}.jsonl"
                file.write_text("\n".join(trace(name, seed, requests)) + "\n")
        planned = {key: await plan(meshes, key[0], file) for key, file in files.items()}
        for mesh in meshes:
            record.rows += await measure(mesh, files, folder)
    for row in record.rows:
        row["planned"] = planned[row["workload"], row["seed"]][row["mesh"]]
    for name in WORKLOADS:
        shares: list[float] = []
        for seed in seeds:
            chosen = next(iter(planned[name, seed]))
            live = {
                row["mesh"]: row["live"]
                for row in record.rows
                if (row["workload"], row["seed"]) == (name, seed)
            }
            shares.append(live[chosen] / max(live.values()))
            best = max(live, key=lambda mesh: live[mesh])
            print(
                f"{name}, seed {seed}: the planner chooses {chosen}, {live[chosen]:.1%}; ", end=""
            )
            print(f"best was {best}, {live[best]:.1%}")
        value = statistics.median(shares)
        record.goal(GOAL, f"choice, {name}: attained by the best", value, ">=", SHARE)
    off = statistics.median(abs(row["live"] - row["planned"]) for row in record.rows)
    print(f"attainment, live beside planned: {off:.1%} off in the median")


def main() -> None:
    parser = arguments(__doc__, "one seed, short, prints only")
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--seeds", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--requests", type=int, default=80)
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds, asked.requests = [1], 40
    record = Record.of(__file__, asked)
    asyncio.run(ask(list(asked.meshes), list(asked.seeds), asked.requests, record))
    record.finish()


if __name__ == "__main__":
    main()
