"""How long a first token waits, in closed form: M/D/1 queues of DistServe (OSDI'24, section 3.1).

One device needs ``service_s`` for a prompt; prompts arrive by Poisson at ``rate``. All times in
seconds. A queue that its rate fills is infinite.
"""

from __future__ import annotations

import math

from services.planner.core.founding import rps_in_turn, rps_per_gpu
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.core.placement import best_rate


def waiting_s(rate: float, service_s: float) -> float:
    """Mean wait of an M/D/1 queue (Pollaczek-Khinchine), infinite at full load."""
    load = rate * service_s
    return math.inf if load >= 1 else rate * service_s**2 / (2 * (1 - load))


def ttft_single(rate: float, service_s: float) -> float:
    """Mean time to first token of one device."""
    return service_s + waiting_s(rate, service_s)


def ttft_pipeline(rate: float, service_s: float) -> float:
    """Of two equal pipeline stages: a prompt takes as long, the next begins a stage later."""
    return service_s + waiting_s(rate, service_s / 2)


def ttft_tensor(rate: float, service_s: float, speedup: float) -> float:
    """Of a tensor-parallel group that is ``speedup`` times as fast as one device."""
    return ttft_single(rate, service_s / speedup)


def crossover(speedup: float) -> float:
    """Load (rate x service time) from which two stages beat tensor parallelism over two devices.

    speedup: of the latter, more than 1 and less than 2.
    """
    # It lies below the speedup: from there on the group's queue is infinite, the stages' is not.
    return best_rate(
        lambda load: ttft_tensor(load, 1.0, speedup) < ttft_pipeline(load, 1.0), speedup, 1e-12
    )


def queue_tables() -> list[PaperTable]:
    """DistServe's motivation and its queues, theirs beside ours."""
    mix = rps_per_gpu(2, 1)
    rows = [
        PaperRow("2P + 1D, requests/s a GPU", "3.3", mix, why="theirs is rounded down"),
        PaperRow("against 1.6 of one colocated GPU under its SLOs", "2.1x", mix / 1.6, unit="x"),
        PaperRow(
            "one GPU in turn, no interference, no SLO",
            "",
            rps_in_turn(),
            3,
            why="more than 2P + 1D: the gain is goodput under SLOs, not throughput",
        ),
    ]
    loads = [
        PaperRow(
            f"tensor parallelism loses from load R*D, speedup {speedup}", "", crossover(speedup), 3
        )
        for speedup in (1.5, 1.7, 1.9)
    ]
    times = [
        PaperRow(f"mean TTFT, D = 0.2 s, R = {rate}, {name}", "", value, 5, "s")
        for rate in (4.0, 4.9)
        for name, value in (
            ("one device", ttft_single(rate, 0.2)),
            ("two stages", ttft_pipeline(rate, 0.2)),
            ("two tensor-parallel, K = 1.5", ttft_tensor(rate, 0.2, 1.5)),
            ("two tensor-parallel, K = 1.8", ttft_tensor(rate, 0.2, 1.8)),
        )
    ]
    return [
        PaperTable("DistServe: OPT-13B, 512 in / 64 out, A100 (section 2)", rows),
        PaperTable(
            "DistServe: M/D/1 prefill queues (section 3.1)",
            [*times, *loads],
            ["the paper prints the formulas and a plot; these are its formulas' values"],
        ),
    ]
