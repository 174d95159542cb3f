"""What a decode step takes with more rows, and beside a process that prefills: a limit of row 9.

    python -m bench.disaggregation.steps [--repetitions 5] [--steps 60]

Two processes with the engine and the model of this folder, one thread each: one decodes through the
real loop, the other idles or computes one prompt after the other. The latter comes second, with as
many tokens more of context as steps were made. Prints a table, writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from bench.disaggregation.run import VOCAB, make_model
from bench.ends import EngineEnd, our_engine
from bench.record import span, spread

ROWS = (1, 2, 3, 4, 6, 8)
CONTEXT = 300
"""Tokens of a sequence: the median prompt of Azure's conversations here, and some of an answer."""

PROMPT = 256


def measure(decode: EngineEnd, prefill: EngineEnd, rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step, alone and beside prompts."""
    decode.ask("fill", rows=rows, context=CONTEXT)
    alone = decode.ask("decode", steps=steps)["seconds"]
    # Prompts for longer than the steps will take: they are a warm-up prompt, and these.
    prompt_s = statistics.median(prefill.ask("prefill", tokens=PROMPT, times=1)["seconds"])
    times = 1 + int(2 * sum(alone) / prompt_s)
    prefill.tell({"do": "prefill", "tokens": PROMPT, "times": times})
    beside = decode.ask("decode", steps=steps)["seconds"]
    prefill.answer()
    return {"alone": alone, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    took: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        with our_engine(folder, 1, VOCAB) as decode, our_engine(folder, 1, VOCAB) as prefill:
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
    print("\nStep over that of one row alone, within a repetition: median [lowest .. highest]")
    for (rows, how), found in sorted(took.items()):
        print(f"{rows} rows, {how}: {span(spread(found), '.2f')}")


if __name__ == "__main__":
    main()
