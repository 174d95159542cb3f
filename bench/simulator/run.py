"""How long does the simulator take for a request?

    python -m bench.simulator.run [--quick | --million] [--requests 1000] [--repetitions 3]

64 workers under Azure-like conversations, one core, CPU time. What the numbers mean: README.md
beside this file.
"""

from __future__ import annotations

import resource
import time
from typing import Any, Literal, NamedTuple

from bench.record import Record, arguments, ratios, spread
from services.cli.plan.sim_flags import SimFlags
from services.planner.core.mesh_text import read_mesh
from services.planner.mesh_run import MeshRun

MESH = "24P+40D"
RATE = 120.0
GOAL_US = 75.0
"""A million requests in 75 seconds."""

MILLION = 1_000_000
GOAL_MIB = 1536.0
"""Of memory, for a million."""


class Setting(NamedTuple):
    """One way to simulate them."""

    policy: str
    fidelity: Literal["runs", "exact"]
    block_size: int


SETTINGS = (
    Setting("least_loaded", "exact", 16),
    Setting("least_loaded", "runs", 16),
    Setting("least_loaded", "runs", 256),
    Setting("conductor", "runs", 256),
)


def simulated(setting: Setting, mesh: str, num_requests: int) -> tuple[float, MeshRun]:
    """Simulate a mesh; CPU seconds of all that ``pdmesh plan simulate`` does, prompts' tokens
    included, and the run."""
    flags = SimFlags(rate=RATE, num_requests=num_requests, **setting._asdict())
    began_s = time.process_time()
    run = flags.run(read_mesh(mesh))
    return time.process_time() - began_s, run


def main() -> None:
    parser = arguments(__doc__, "short, prints only")
    parser.add_argument("--million", action="store_true", help="once, and its memory; an hour")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    if asked.quick:
        asked.requests, asked.repetitions = min(asked.requests, 100), 1
    settings = SETTINGS
    if asked.million:
        asked.requests, asked.repetitions, settings = MILLION, 1, SETTINGS[2:3]
    record = Record.of(__file__, asked)
    taken: dict[Setting, list[float]] = {setting: [] for setting in settings}
    events: dict[Setting, float] = {}
    for _ in range(asked.repetitions):
        for setting in settings:  # in turns: what disturbs one disturbs all
            cpu_s, run = simulated(setting, MESH, asked.requests)
            taken[setting].append(cpu_s / asked.requests * 1e6)
            events[setting] = run.num_events / asked.requests
    for setting, values in taken.items():
        row: dict[str, Any] = {
            **setting._asdict(),
            "mesh": MESH,
            "rate": RATE,
            "num_requests": asked.requests,
            "us": spread(values),
            "events_a_request": events[setting],
            "times_first": ratios(values, taken[settings[0]]),
            "most_kib_so_far": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        record.add(row)
        print(
            f"{setting.policy:13} {setting.fidelity:6} blocks of {setting.block_size:<4}"
            f"{row['us']['median']:8.0f} us CPU a request, {events[setting]:.0f} events, "
            f"{row['times_first']['median']:.2f} x the first"
        )
        if setting.fidelity == "runs" and setting.block_size == 256:
            of = "a million requests, " if asked.million else ""
            what = f"{of}{setting.policy}, {MESH}: CPU us a request"
            record.goal(18, what, row["us"], "<=", GOAL_US)
            if asked.million:
                mib = row["most_kib_so_far"] / 1024
                record.goal(18, f"{of}{setting.policy}, {MESH}: memory, MiB", mib, "<=", GOAL_MIB)
    record.finish()


if __name__ == "__main__":
    main()
