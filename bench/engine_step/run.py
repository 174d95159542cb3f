"""Time bare engine steps; see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from shared.engine.torch_engine import TorchEngine
from shared.request import SamplingParams
from shared.step import SampleSpec, StepRow

PROMPT_LEN = 128
PREFILL_LEN = 1024
_WARM_UP = 2


def make_model(folder: Path) -> None:
    """Write the random checkpoint."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def timed(step: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Time ``step(i)`` for growing i; seconds."""
    samples: list[float] = []
    for i in range(_WARM_UP + repeats):
        began_at = time.perf_counter()
        step(i)
        samples.append(time.perf_counter() - began_at)
    samples = sorted(samples[_WARM_UP:])
    return {"best_s": samples[0], "median_s": samples[len(samples) // 2]}


def decode(engine: TorchEngine, batch: int, repeats: int) -> dict[str, float]:
    """Time decode steps of ``batch`` sequences."""
    blocks = -(-(PROMPT_LEN + _WARM_UP + repeats) // engine.block_size)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
    params = SamplingParams()
    for table in tables:
        engine.step([StepRow(list(range(PROMPT_LEN)), 0, table)])

    def step(i: int) -> None:
        sample = SampleSpec(params, i, (), ())
        engine.step([StepRow([7], PROMPT_LEN + i, table, sample) for table in tables])

    result = timed(step, repeats)
    return {**result, "tokens_per_s": batch / result["median_s"]}


def prefill(engine: TorchEngine, chunk: int, repeats: int) -> dict[str, float]:
    """Time a whole prompt in chunks."""
    table = list(range(-(-PREFILL_LEN // engine.block_size)))
    sample = SampleSpec(SamplingParams(), 0, (), ())

    def step(_: int) -> None:
        for start in range(0, PREFILL_LEN, chunk):
            is_last = start + chunk >= PREFILL_LEN
            engine.step([StepRow([7] * chunk, start, table, sample if is_last else None)])

    result = timed(step, repeats)
    return {**result, "tokens_per_s": PREFILL_LEN / result["median_s"]}


def main() -> None:
    """Run all cases and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        engine = TorchEngine.load(
            name,
            device=args.device,
            dtype=args.dtype,
            num_threads=args.threads,
            num_blocks=16 * 64,
        )
        dtypes = sorted({str(weight.dtype) for weight in engine.decoder.weights})
        report = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": args.threads,
            "weights": dtypes,
            "decode_1": decode(engine, 1, args.repeats),
            "decode_16": decode(engine, 16, args.repeats),
            "prefill_1024": prefill(engine, PREFILL_LEN, max(3, args.repeats // 5)),
            "prefill_4x256": prefill(engine, 256, max(3, args.repeats // 5)),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
