"""Our engine over vLLM's executor beside vLLM's own engine: what does the mesh's schedule cost?

    make setup-vllm
    python -m bench.engine.over_vllm [--quick] [--sizes 125m 1.1b] [--batches 1 16 64]

Both run in the environment that ``make setup-vllm`` makes, with vLLM's
default settings (compiled), asked in turn as in ``run.py``. What the numbers mean: README.md beside
this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.ends import EngineEnd
from bench.engine import model
from bench.engine.run import HERE, in_turns
from bench.record import PROJECT, Record, arguments, ratios, spread

OURS, THEIRS = "pdmesh over vllm", "vllm"
PYTHON = Path(os.environ.get("VLLM_VENV") or PROJECT / ".venv-vllm") / "bin" / "python"
CONTEXT = 512
STEP_SHARE, PREFILL_SHARE = 1.10, 1.05


def start(folder: Path, threads: int) -> list[EngineEnd]:
    vocab, length = str(model.VOCAB), str(model.MAX_LEN)
    blocks = str(64 * (2048 // 32 + 8))
    ours = [str(PYTHON), "-m", "bench.engine.our_end", str(folder), "--engine", "vllm"]
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    ours += ["--threads", str(threads), "--vocab", vocab, "--num-blocks", blocks]
    theirs = [str(PYTHON), str(HERE / "vllm_end.py"), str(folder), vocab, length, length]
    return [
        EngineEnd(OURS, ours, settings),
        EngineEnd(THEIRS, theirs, {**settings, "VLLM_CPU_KVCACHE_SPACE": "4"}),
    ]


def compare(record: Record, ends: list[EngineEnd], size: str, asked: argparse.Namespace) -> None:
    for tokens in asked.prefills:
        took: dict[str, list[float]] = {end.name: [] for end in ends}
        for _ in range(asked.repetitions):
            for end in ends:
                took[end.name] += end.ask("prefill", tokens=tokens, times=1)["seconds"]
        note(record, f"{size}: prompt of {tokens}", took, PREFILL_SHARE)
    total = (asked.repetitions + 1) * asked.steps + 8
    for batch in asked.batches:
        for end in ends:
            end.ask("fill", rows=batch, context=CONTEXT, steps=total)
        answers = in_turns(ends, asked.repetitions, "decode", steps=asked.steps)
        took = {
            name: [statistics.median(one["seconds"]) for one in told]
            for name, told in answers.items()
        }
        note(record, f"{size}: step of {batch} at {CONTEXT}", took, STEP_SHARE)


def note(record: Record, what: str, took: dict[str, list[float]], bound: float) -> None:
    """Keep a row: both times, and ours as a share of theirs."""
    share = ratios(took[OURS], took[THEIRS])
    row: dict[str, Any] = {"what": what, "share": share}
    for name, seconds in took.items():
        row[name] = {"ms": spread([1e3 * one for one in seconds])}
    record.goal(12, f"over vllm, {what}: x vllm's time", share, "<=", bound)
    record.add(row)
    times = "   ".join(f"{name} {row[name]['ms']['median']:.2f} ms" for name in took)
    print(f"{what:28} {times}   x {share['median']:.3f}", flush=True)


def main() -> None:
    parser = arguments(__doc__, "2 repetitions, not recorded")
    parser.add_argument("--sizes", nargs="+", choices=model.MODELS, default=list(model.MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 16, 64))
    parser.add_argument("--prefills", type=int, nargs="*", default=(1024,))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="decode steps a repetition")
    asked = parser.parse_args()
    if not PYTHON.exists():
        sys.exit(f"{PYTHON} is not there: make setup-vllm")
    if asked.quick:
        asked.repetitions = 2
    record = Record.of(__file__, asked)
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as name:
            model.make(Path(name), model.MODELS[size])
            ends: list[EngineEnd] = []
            try:
                ends = start(Path(name), asked.threads)
                record.environment["engines"] = {end.name: end.about for end in ends}
                compare(record, ends, size, asked)
            finally:
                for end in ends:
                    end.close()
    record.finish()


if __name__ == "__main__":
    main()
