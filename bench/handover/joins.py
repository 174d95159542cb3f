"""What does the step cost that a sequence joins: beside others, and where nothing ran for a while?

    python -m bench.handover.joins [--engine torch|vllm] [--pause-s 0.03]

The engine alone, in this process, with the demo model and one thread: no services. ``--engine
vllm`` in the environment that ``make setup-vllm`` makes. Prints only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from shared.config import DecodeConfig
from shared.engine.base import Engine
from shared.engine.load import load_engine
from shared.model_folder import resolve_model
from shared.request import SamplingParams
from shared.step import SampleSpec, StepRow

PROMPT, STEPS = 100, 6
STEPS_OF = ("goes on", "joins", "joins another", "goes on after a pause", "joins after it")
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


class Answer:
    """A sequence whose prompt's KV is there already, as after a hand-over."""

    def __init__(self, engine: Engine, first_block: int, source: random.Random) -> None:
        num_blocks = -(-(PROMPT + STEPS + 1) // engine.block_size)
        self._table = list(range(first_block, first_block + num_blocks))
        self._prompt = [source.randrange(3, engine.spec.vocab_size) for _ in range(PROMPT)]
        self._output = [5]

    def row(self) -> StepRow:
        """Its next one."""
        output = tuple(self._output)
        sample = SampleSpec(PARAMS, len(output), self._prompt, output)
        return StepRow(output[-1:], PROMPT + len(output) - 1, self._table, sample)

    def goes_on(self, token: int) -> None:
        """Take in what was sampled."""
        self._output.append(token)


def step_s(engine: Engine, answers: Sequence[Answer]) -> float:
    """Make a step of them all; return how long it took."""
    rows = [answer.row() for answer in answers]
    began_at = time.perf_counter()
    results = engine.step(rows)
    took = time.perf_counter() - began_at
    for answer, result in zip(answers, results, strict=True):
        answer.goes_on(result.token_id)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--pause-s", type=float, default=0.03)
    parser.add_argument("--repetitions", type=int, default=60)
    asked = parser.parse_args()
    config = DecodeConfig(
        engine=asked.engine,
        device="cpu",
        model=str(resolve_model("demo")),
        vllm_args="enforce_eager=true" if asked.engine == "vllm" else "",
        num_blocks=64,
        threads=1,
    )
    config.check()
    engine = load_engine(config)
    source = random.Random(1)
    took: dict[str, list[float]] = {}
    for _ in range(asked.repetitions):
        for what in STEPS_OF:
            first, second = Answer(engine, 5, source), Answer(engine, 30, source)
            for _ in range(STEPS - 2):
                step_s(engine, [first])
            if "after" in what:
                time.sleep(asked.pause_s)
            if what.startswith("goes on"):
                rows = [first]
            else:
                rows = [first, second] if what == "joins another" else [second]
            took.setdefault(what, []).append(step_s(engine, rows))
    steady = statistics.median(took["goes on"])
    for what, seconds in took.items():
        median = statistics.median(seconds)
        print(f"{what:24} {1e3 * median:6.2f} ms   x {median / steady:.2f}")
    engine.close()


if __name__ == "__main__":
    main()
