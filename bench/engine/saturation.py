"""From how many tokens on a step of a prompt keeps this machine busy: where batching ends to pay.

    python -m bench.engine.saturation [--repetitions 5]

The model of this folder, through the scheduler, one thread and then all. Tokens per second of one
prompt of each length; what reaches most of the best is ``saturating_tokens`` of
``shared/engine/torch_engine.py``. Prints a table, writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.engine import model
from bench.record import spread
from bench.transfer.pairs import End, without_ucx

LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = 512
"""Computed of each length in one repetition, at least."""


def measure(threads: int, folder: Path, repetitions: int) -> None:
    """Ask for every length in turn and print."""
    end = End(
        [sys.executable, "-m", "bench.engine.our_end", str(folder), "--threads", str(threads),
         "--vocab", str(model.VOCAB)],
        without_ucx(),
    )  # fmt: skip
    rates: dict[int, list[float]] = {length: [] for length in LENGTHS}
    try:
        end.answer()
        for _ in range(repetitions):
            for length in LENGTHS:
                end.tell({"do": "prefill", "tokens": length, "times": max(3, TOKENS // length)})
                rates[length].append(length / statistics.median(end.answer()["seconds"]))
    finally:
        end.close()
    best = [max(rates[length][at] for length in LENGTHS) for at in range(repetitions)]
    print(f"\n{threads} threads: tokens/s, and the share of the best in the same repetition")
    for length in LENGTHS:
        share = spread([rate / top for rate, top in zip(rates[length], best, strict=True)])
        print(
            f"{length:5} tokens {statistics.median(rates[length]):8.0f}   "
            f"{share['median']:.2f} [{share['min']:.2f} .. {share['max']:.2f}]"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model.make(Path(name))
        for threads in sorted({1, os.cpu_count() or 1}):
            measure(threads, Path(name), asked.repetitions)


if __name__ == "__main__":
    main()
