"""The founding documents' figures that come from public data: medians, steps, ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.rows import DataError
from services.planner.splitwise_data import machine_times, read_perf_model, runs_of
from services.planner.traces import read_azure, read_mooncake
from services.sim.baselines.splitwise_times import MeasuredRun


def decode_ms(runs: Sequence[MeasuredRun], model: str, hardware: str, batch: int) -> float:
    """Return the median time of a decode step, with 8 GPUs and prompts of 512 tokens.

    Raises DataError: there are no such runs.
    """
    own = runs_of(runs, model, hardware)
    own = [run for run in own if (run.batch, run.prompt_len) == (batch, 512)]
    if not own:
        raise DataError(f"no runs of {model} on {hardware} with {batch} prompts of 512 tokens")
    return median(run.token_ms for run in own)


def data_tables(folder: Path) -> list[PaperTable]:
    """Recompute them from a folder with the Azure and Mooncake traces and Splitwise's runs.

    Raises DataError.
    """
    rows: list[PaperRow] = []
    for name, theirs in (("code", ("1500", "13")), ("conv", ("1020", "129"))):
        lengths = read_azure(folder, name)
        for idx, side in enumerate(("prompt", "answer")):
            rows.append(
                PaperRow(
                    f"Azure 2023 {name}, median {side}",
                    theirs[idx],
                    median(pair[idx] for pair in lengths),
                    0,
                    "tokens",
                    "rounded there" if theirs[idx] == "1500" else "",
                )
            )
    for name in ("conversation", "synthetic"):
        lines = read_mooncake(folder, name)
        ratio = fmean(line.num_input / max(1, line.num_output) for line in lines)
        why = "theirs is of another trace, 7590/182 = 41.7 by means: a mean of ratios, as ours"
        rows.append(PaperRow(f"Mooncake {name}, mean of input/output", "720", ratio, 0, why=why))
    runs = read_perf_model(folder)
    speeds = [
        PaperRow(
            f"{model}, {hardware}, prefill at {tokens} tokens",
            "",
            tokens / machine_times(runs, model, hardware).prompt_s(tokens),
            0,
            "tokens/s",
            "the peak" if tokens == 2048 else "",
        )
        for model, hardware in (
            ("llama2-70b", "h100-80gb"),
            ("llama2-70b", "a100-80gb"),
            ("bloom-176b", "h100-80gb"),
        )
        for tokens in (1024, 2048, 4096)
    ]
    steps = [
        PaperRow(
            f"llama2-70b, {hardware}, decode step of {batch}",
            "",
            decode_ms(runs, "llama2-70b", hardware, batch),
            1,
            "ms",
        )
        for hardware in ("h100-80gb", "a100-80gb")
        for batch in (1, 16, 64)
    ]
    return [
        PaperTable("Lengths in public traces", rows),
        PaperTable(
            "Where prefill saturates, what batching costs decode (8 GPUs)", [*speeds, *steps]
        ),
    ]
