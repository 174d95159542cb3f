"""How long do other simulators take for the requests that ours takes so long for?

    python -m bench.simulator.peers --splitwise DIR --simdistserve DIR --vidur DIR [--quick]

Each DIR is a clone (Mutinifni/splitwise-sim, LLMServe/DistServe, microsoft/vidur), and
``--python-for-splitwise`` and so on name an interpreter that has what it imports. All get one list
of arrivals and lengths. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import Record, arguments, ratios, spread
from bench.simulator.run import MESH, RATE, Setting, simulated
from services.cli.plan.sim_flags import SimFlags
from services.planner.core.mesh_text import read_mesh

HERE = Path(__file__).parent
LIMIT_S = 3600.0
"""Of one run of a peer, its start-up included."""


class Peer(NamedTuple):
    """Another simulator. holds: what its clone must have."""

    repository: str
    holds: tuple[str, ...]
    does: str


PEERS = {
    "splitwise": Peer(
        "Mutinifni/splitwise-sim", ("run.py", "data/perf_model.csv"), "apart; skips equal steps"
    ),
    "simdistserve": Peer(
        "LLMServe/DistServe", ("simdistserve/clusters/disagg.py",), "apart; every step"
    ),
    "vidur": Peer("microsoft/vidur", ("vidur/simulator.py",), "colocated; every step"),
}


OURS = (
    (MESH, Setting("least_loaded", "runs", 16)),
    (MESH, Setting("least_loaded", "exact", 16)),
    (MESH, Setting("least_loaded", "runs", 256)),
    ("64M", Setting("least_loaded", "runs", 16)),
    ("64M", Setting("least_loaded", "exact", 16)),
)


class Told(NamedTuple):
    """What one run tells. felt: of each request that ended, seconds to its first and last token."""

    cpu_s: float
    num_events: int
    felt: list[tuple[float, float]]


class PeerError(Exception):
    """A peer cannot be run; says what to do."""


def load_of(num_requests: int) -> dict[str, Any]:
    """Return what every simulator gets: workers, and of each request arrival, prompt, answer."""
    shape = read_mesh(MESH)
    flags = SimFlags(rate=RATE, num_requests=num_requests)
    asks = flags.workload_of([part.unit for part in shape.parts]).asks
    return {
        "prefill": shape.num_of("P"),
        "decode": shape.num_of("D"),
        "asks": [(ask.due_s, ask.num_input, ask.num_output) for ask in asks],
    }


def ask_ours(mesh: str, setting: Setting, num_requests: int) -> Told:
    cpu_s, run = simulated(setting, mesh, num_requests)
    felt = [(it.ttft_s or 0.0, it.e2e_s or 0.0) for it in run.answers if it.is_complete]
    return Told(cpu_s, run.num_events, felt)


def checked(name: str, clone: Path) -> Path:
    """Return the clone's whole path. Raises PeerError: it is none."""
    for part in PEERS[name].holds:
        if not (clone / part).is_file():
            raise PeerError(
                f"--{name} {clone}: no {part} in it; a clone of github.com/{PEERS[name].repository}"
                " is wanted"
            )
    return clone.resolve()


def ask_peer(name: str, clone: Path, python: str, load: dict[str, Any]) -> Told:
    """Run a peer in a process of its own. Raises PeerError: it did not come to its end."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = folder / "load.json"
        file.write_text(json.dumps(load))
        words = [python, str(HERE / "peer_run.py"), name, str(clone), str(file), place]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        variables.pop("PYTHONPATH", None)
        run = subprocess.run(
            words, capture_output=True, text=True, timeout=LIMIT_S, env=variables, check=False
        )
    if run.returncode or not run.stdout.strip():
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerError(f"{name} ended with {run.returncode}: {last} (--python-for-{name})")
    told = json.loads(run.stdout.strip().splitlines()[-1])
    return Told(told["cpu_s"], told["num_events"], [tuple(one) for one in told["felt"]])


def row_of(name: str, does: str, tolds: list[Told], first: list[float], num: int) -> dict[str, Any]:
    """Return one row of the record. first: microseconds a request of what it is beside."""
    us = [told.cpu_s / num * 1e6 for told in tolds]
    felt = tolds[-1].felt
    return {
        "simulator": name,
        "does": does,
        "num_requests": num,
        "num_ended": len(felt),
        "us": spread(us),
        "requests_a_cpu_second": 1e6 / statistics.median(us),
        "events_a_request": tolds[-1].num_events / num,
        "times_first": ratios(us, first),
        "ttft_s": [statistics.mean(ttft for ttft, _ in felt), max(ttft for ttft, _ in felt)],
        "e2e_s": [statistics.mean(e2e for _, e2e in felt), max(e2e for _, e2e in felt)],
    }


def told_of(row: dict[str, Any]) -> str:
    return (
        f"{row['simulator']:26}{row['us']['median']:8.0f} us CPU a request "
        f"({row['times_first']['median']:.2f} x), {row['events_a_request']:.0f} events, "
        f"{row['num_ended']} of {row['num_requests']} ended, TTFT {row['ttft_s'][0]:.2f} s, "
        f"whole {row['e2e_s'][0]:.1f} s; {row['does']}"
    )


def main() -> None:
    parser = arguments(__doc__, "short, prints only")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    for name, peer in PEERS.items():
        parser.add_argument(f"--{name}", type=Path, help=f"clone of github.com/{peer.repository}")
        parser.add_argument(f"--python-for-{name}", default=sys.executable, help="its interpreter")
    asked = parser.parse_args()
    if asked.quick:
        asked.requests, asked.repetitions = 100, 1
    load, num = load_of(asked.requests), int(asked.requests)
    runs: dict[str, tuple[str, Callable[[], Told]]] = {
        f"pdmesh {mesh} {it.fidelity} {it.block_size}": ("", partial(ask_ours, mesh, it, num))
        for mesh, it in OURS
    }
    record = Record.of(__file__, asked)
    try:
        for name, peer in PEERS.items():
            if (given := getattr(asked, name)) is not None:
                clone, python = checked(name, given), getattr(asked, f"python_for_{name}")
                at = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
                commit = subprocess.run(at, capture_output=True, text=True, check=False)
                record.environment[f"{name}_commit"] = commit.stdout.strip() or "none"
                runs[name] = (peer.does, partial(ask_peer, name, clone, python, load))
        tolds: dict[str, list[Told]] = {name: [] for name in runs}
        for _ in range(asked.repetitions):
            for name, (_, run) in runs.items():  # in turns: what disturbs one disturbs all
                tolds[name].append(run())
    except PeerError as error:
        parser.error(str(error))
    first = [told.cpu_s / num * 1e6 for told in next(iter(tolds.values()))]
    for name, (does, _) in runs.items():
        record.add(row_of(name, does, tolds[name], first, num))
        print(told_of(record.rows[-1]), flush=True)
    record.finish()


if __name__ == "__main__":
    main()
