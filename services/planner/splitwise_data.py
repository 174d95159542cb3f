"""Splitwise's files: measured runs, traces to draw lengths from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from services.planner.rows import DataError, count, first_of, number, read_rows
from services.sim.baselines.splitwise_machine import SplitwiseRequest
from services.sim.baselines.splitwise_times import MachineTimes, MeasuredRun


def read_perf_model(folder: Path) -> list[MeasuredRun]:
    """Return the measured runs that Splitwise publishes. Raises DataError."""
    path = first_of(folder, "splitwise_sim_perf_model.csv", "perf_model.csv")
    columns = (
        "model", "hardware", "prompt_size", "batch_size", "prompt_time", "token_time",
        "tensor_parallel",
    )  # fmt: skip
    runs: list[MeasuredRun] = []
    for line, row in read_rows(path, columns):
        where = f"{path}:{line}"
        runs.append(
            MeasuredRun(
                row["model"],
                row["hardware"],
                count(where, row, "tensor_parallel"),
                count(where, row, "prompt_size"),
                count(where, row, "batch_size"),
                number(where, row, "prompt_time"),
                number(where, row, "token_time"),
            )
        )
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


def read_azure(folder: Path, workload: str) -> list[tuple[int, int]]:
    """Return prompt and output lengths of Azure's trace of 2023: code or conv. Raises DataError."""
    path = first_of(folder, f"AzureLLMInferenceTrace_{workload}_2023.csv")
    lengths = [
        (
            count(f"{path}:{line}", row, "ContextTokens"),
            count(f"{path}:{line}", row, "GeneratedTokens"),
        )
        for line, row in read_rows(path, ("ContextTokens", "GeneratedTokens"))
    ]
    if not lengths:
        raise DataError(f"{path} holds no request")
    return lengths


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
