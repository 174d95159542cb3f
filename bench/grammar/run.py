"""What a grammar costs a decode step: steps of answers that follow one beside steps of free ones.

Question, method and results are in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.engine.model import SIZES, VOCAB, make
from bench.engine.our_end import End
from bench.record import Record, arguments, ratios, spread
from shared.engine.sampling.guides import Guides
from shared.engine.torch_engine import TorchEngine
from shared.grammar import library
from shared.request import SamplingParams, WorkItem
from shared.schedule.sequence import Sequence as TokenSequence

MOST = 1.05
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

    async def take_begun(self) -> None:
        """A grammar takes no token twice: they are waited for, by a step behind them, and dropped
        with their answers."""
        self.sampling = {"temperature": 0.0}
        await self.fill({"rows": 1, "context": 1})


async def step_ms(end: GuidedEnd, steps: int, rows: int, **sampling: Any) -> float:
    """Median time from one step's tokens to the next's."""
    end.sampling = sampling
    await end.fill({"rows": rows, "context": CONTEXT})
    found = await end.decode({"steps": steps})
    return float(statistics.median(found["seconds"]) * 1000)


async def measure(end: GuidedEnd, asked: argparse.Namespace) -> list[dict[str, float]]:
    """Return the milliseconds of each kind of step, a repetition a line."""
    grammar = library().LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    kinds: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": 1.0},
        "drawn, guided": {"temperature": 1.0, "grammar": grammar},
        "greedy": {"temperature": 0.0},
        "greedy, guided": {"temperature": 0.0, "grammar": grammar},
    }
    found: list[dict[str, float]] = []
    for repetition in range(asked.repetitions + 1):  # the first warms up
        row = {
            name: await step_ms(end, asked.steps, asked.rows, **kind)
            for name, kind in kinds.items()
        }
        if repetition:
            found.append(row)
            print({name: round(ms, 3) for name, ms in row.items()}, file=sys.stderr, flush=True)
    return found


def note(record: Record, found: list[dict[str, float]], about: str) -> None:
    """Keep medians, and ratios within a repetition."""
    row: dict[str, Any] = {"about": about}
    row |= {name: spread([one[name] for one in found]) for name in found[0]}
    for kind in ("drawn", "greedy"):
        share = ratios([one[f"{kind}, guided"] for one in found], [one[kind] for one in found])
        row[f"{kind}, x free"] = share
        record.goal(21, f"{about}, {kind}: guided step x free", share, "<=", MOST)
    record.add(row)


def main() -> None:
    parser = arguments(__doc__, "2 repetitions, not recorded")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    if asked.quick:
        asked.repetitions = 2
    record = Record.of(__file__, asked)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), SIZES)
        tokenizer = a_tokenizer(VOCAB)
        for threads in sorted({1, torch.get_num_threads()}) if asked.device == "cpu" else (None,):
            engine = TorchEngine.load(
                folder, num_blocks=2048, device=asked.device, num_threads=threads
            )
            engine._guides = Guides(tokenizer.to_str, engine.spec.vocab_size, [0])  # pyright: ignore[reportPrivateUsage]
            record.environment["engines"] = {"pdmesh": dict(engine.machine)}
            found = uvloop.run(measure(GuidedEnd(engine, VOCAB), asked))
            where = f"{threads} of {os.cpu_count()} cores" if threads else asked.device
            note(record, found, f"{asked.rows} rows, kernels on {where}")
            engine.close()
    record.finish()


if __name__ == "__main__":
    main()
