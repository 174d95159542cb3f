"""What a grammar costs a decode step: steps of answers that follow one beside steps of free ones.

Question, method and results are in README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.engine.model import SIZES, VOCAB, make
from bench.engine.our_end import End
from shared.engine.guides import Guides
from shared.engine.torch_engine import TorchEngine
from shared.grammar import library
from shared.request import SamplingParams, WorkItem
from shared.schedule.sequence import Sequence as TokenSequence

ROWS = 16
CONTEXT = 128
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "when": {"type": "string", "format": "date-time"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
            "size": {"type": "number"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "when", "tags", "size", "ok"],
        "additionalProperties": False,
    },
}
"""No answer of a measurement ends."""


def texts(most: int) -> Iterator[str]:
    """Python's standard library, for a vocabulary of words and signs."""
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text("utf-8", errors="ignore")
        size += len(text)
        if size > most:
            return
        yield text


def a_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of ``size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(8_000_000), trainer)
    return tokenizer


class GuidedEnd(End):
    """Answers as the next question wants them."""

    sampling: dict[str, Any]

    def sequence(self, tokens: int, wanted: int) -> TokenSequence:
        prompt = tuple(self.rng.randrange(1, self.vocab) for _ in range(tokens))
        params = SamplingParams(
            max_tokens=wanted, ignore_eos=True, seed=self.rng.randrange(1 << 30), **self.sampling
        )
        return TokenSequence(WorkItem(token_ids=prompt, num_prompt_tokens=tokens, sampling=params))


async def step_ms(end: GuidedEnd, steps: int, rows: int, **sampling: Any) -> float:
    """Median time from one step's tokens to the next's."""
    end.sampling = sampling
    await end.fill({"rows": rows, "context": CONTEXT})
    found = await end.decode({"steps": steps})
    return float(statistics.median(found["seconds"]) * 1000)


async def measure(end: GuidedEnd, steps: int, repeats: int, rows: int) -> list[dict[str, float]]:
    grammar = library().LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    kinds: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": 1.0},
        "drawn, guided": {"temperature": 1.0, "grammar": grammar},
        "greedy": {"temperature": 0.0},
        "greedy, guided": {"temperature": 0.0, "grammar": grammar},
    }
    found: list[dict[str, float]] = []
    for repeat in range(repeats + 1):  # the first warms up
        row = {name: await step_ms(end, steps, rows, **kind) for name, kind in kinds.items()}
        if repeat:
            found.append(row)
            print({name: round(ms, 3) for name, ms in row.items()}, file=sys.stderr, flush=True)
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and ratios within a repetition."""
    told: dict[str, Any] = {
        name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]
    }
    for kind in ("drawn", "greedy"):
        ratios = sorted(row[f"{kind}, guided"] / row[kind] for row in rows)
        told[f"ratio, {kind}"] = [
            round(value, 3) for value in (statistics.median(ratios), ratios[0], ratios[-1])
        ]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), SIZES)
        tokenizer = a_tokenizer(VOCAB)
        engine = TorchEngine.load(folder, num_blocks=2048, device=options.device)
        engine._guides = Guides(tokenizer.to_str, engine.spec.vocab_size, [0])  # pyright: ignore[reportPrivateUsage]
        end = GuidedEnd(engine, VOCAB)
        began_at = time.perf_counter()
        rows = uvloop.run(measure(end, options.steps, options.repeats, options.rows))
        told = summary(rows)
        told |= {"machine": engine.machine, "rows": options.rows, "vocab": VOCAB}
        told |= {"seconds": round(time.perf_counter() - began_at, 1), "torch": torch.__version__}
        print(json.dumps(told))


if __name__ == "__main__":
    main()
