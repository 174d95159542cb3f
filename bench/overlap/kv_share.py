"""When a layer's KV is written, as a share of the layer's compute: what ``run.py`` models.

    python -m bench.overlap.kv_share [--repetitions 5]

Our engine with the model of bench/engine, one thread, prompts of 256, 1,024 and 4,096 tokens: a
layer's KV is there after its projections, and ``on_layer`` is told; attention and MLP follow.
Prints a line a length, writes nothing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from bench.engine import model
from bench.record import span, spread
from shared.engine.torch_engine import TorchEngine
from shared.step import StepRow

LENGTHS = (256, 1024, 4096)


def share_of(engine: TorchEngine, num_tokens: int) -> float:
    """Compute one prompt; return 1 less what follows the last layer's KV, in times a layer."""
    told_at: list[float] = []
    prompt = random.Random(num_tokens).choices(range(model.VOCAB), k=num_tokens)
    blocks = range(-(-num_tokens // engine.block_size))
    row = StepRow(token_ids=prompt, start=0, block_table=list(blocks))
    engine.step([row], lambda layer: told_at.append(time.perf_counter()))
    ended_at = time.perf_counter()
    layer_s = (told_at[-1] - told_at[0]) / (len(told_at) - 1)
    return 1 - (ended_at - told_at[-1]) / layer_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model.make(Path(name))
        engine = TorchEngine.load(Path(name))
        for num_tokens in LENGTHS:
            shares = [share_of(engine, num_tokens) for _ in range(asked.repetitions + 1)]
            found = span(spread(shares[1:]), ".2f")  # the first one warms up
            print(f"{num_tokens:5} tokens: KV written at {found} of a layer", flush=True)


if __name__ == "__main__":
    main()
