"""What a decode step takes with more rows, and beside a process that prefills: a limit of row 9.

    python -m bench.disaggregation.steps [--repetitions 5] [--steps 60]

Two processes with the engine and the model of this folder, one thread each: one decodes through the
real loop, the other idles or computes one prompt after the other. The latter comes second, with as
many tokens more of context as steps were made. Prints a table, writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.disaggregation.run import VOCAB, make_model
from bench.record import spread
from bench.transfer.pairs import End, without_ucx

ROWS = (1, 2, 3, 4, 6, 8)
CONTEXT = 300
"""Tokens of a sequence: the median prompt of Azure's conversations here, and some of an answer."""

PROMPT = 256


def start(folder: Path) -> End:
    """One engine in a process of its own."""
    end = End(
        [sys.executable, "-m", "bench.engine.our_end", str(folder), "--threads", "1", "--vocab",
         str(VOCAB), "--num-blocks", "1024"],
        without_ucx(),
    )  # fmt: skip
    end.answer()
    return end


def ask(end: End, **job: Any) -> Any:
    """Order something and wait for it."""
    end.tell(job)
    return end.answer()


def measure(decode: End, prefill: End, rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step, alone and beside prompts."""
    ask(decode, do="fill", rows=rows, context=CONTEXT)
    alone = ask(decode, do="decode", steps=steps)["seconds"]
    # Prompts for longer than the steps will take: they are a warm-up prompt, and these.
    prompt_s = statistics.median(ask(prefill, do="prefill", tokens=PROMPT, times=1)["seconds"])
    times = 1 + int(2 * sum(alone) / prompt_s)
    prefill.tell({"do": "prefill", "tokens": PROMPT, "times": times})
    beside = ask(decode, do="decode", steps=steps)["seconds"]
    prefill.answer()
    return {"alone": alone, "beside": beside}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    took: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        decode, prefill = start(folder), start(folder)
        try:
            for repetition in range(asked.repetitions):
                base = 0.0
                for rows in ROWS:
                    for how, seconds in measure(decode, prefill, rows, asked.steps).items():
                        median = statistics.median(seconds)
                        base = base or median  # of one row, alone
                        took.setdefault((rows, how), []).append(median / base)
                        print(
                            f"{repetition}: {rows} rows, {how}: {median * 1e3:.2f} ms", flush=True
                        )
        finally:
            decode.close()
            prefill.close()
    print("\nStep over that of one row alone, within a repetition: median [lowest .. highest]")
    for (rows, how), found in sorted(took.items()):
        over = spread(found)
        print(f"{rows} rows, {how}: {over['median']:.2f} [{over['min']:.2f} .. {over['max']:.2f}]")


if __name__ == "__main__":
    main()
