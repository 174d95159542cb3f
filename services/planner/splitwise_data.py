"""Splitwise's measured runs, and requests as its traces are made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from services.planner.rows import DataError, first_of, read_rows
from services.sim.baselines.splitwise import SplitwiseRequest
from services.sim.baselines.splitwise_times import MachineTimes, MeasuredRun


def read_perf_model(folder: Path) -> list[MeasuredRun]:
    """Return the measured runs that Splitwise publishes. Raises DataError."""
    path = first_of(folder, "splitwise_sim_perf_model.csv", "perf_model.csv")
    runs = [run for _, run in read_rows(path, MeasuredRun)]
    if not runs:
        raise DataError(f"{path} holds no run")
    return runs


def runs_of(runs: Sequence[MeasuredRun], model: str, hardware: str) -> list[MeasuredRun]:
    """Return the runs of a machine with 8 GPUs. Raises DataError: there are none."""
    found = [run for run in runs if (run.model, run.hardware, run.tp) == (model, hardware, 8)]
    if not found:
        known = sorted({f"{run.model} on {run.hardware} tp{run.tp}" for run in runs})
        raise DataError(f"no runs of {model} on {hardware} tp8; known: {', '.join(known)}")
    return found


def machine_times(runs: Sequence[MeasuredRun], model: str, hardware: str) -> MachineTimes:
    """Return the curves of a machine with 8 GPUs."""
    source = f"Splitwise's medians of {model} on {hardware}, 8 GPUs"
    return MachineTimes(runs_of(runs, model, hardware), source)


def drawn(
    lengths: Sequence[tuple[int, int]], rate: float, duration_s: float, seed: int
) -> list[SplitwiseRequest]:
    """Draw requests by Poisson for so long, lengths with replacement, as their traces are made."""
    rng = random.Random(seed)
    at, requests = rng.expovariate(rate), list[SplitwiseRequest]()
    while at < duration_s:
        requests.append(SplitwiseRequest(len(requests), at, *rng.choice(lengths)))
        at += rng.expovariate(rate)
    return requests
