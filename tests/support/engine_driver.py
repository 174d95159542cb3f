"""A naive scheduler that drives one engine: enough to put rows together in every way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.engine.base import Engine
from shared.request import SamplingParams
from shared.step import Guide, RowResult, SampleSpec, StepRow


@dataclass
class Running:
    """One sequence. results: one per sampled token. prompt_results: as the chunks gave them. guide:
    made with its first row, from what the answer has by then."""

    prompt: list[int]
    params: SamplingParams
    block_table: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    results: list[RowResult] = field(default_factory=list)
    prompt_results: list[RowResult] = field(default_factory=list)
    guide: Guide | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.params.max_tokens

    def row(self, chunk: int) -> StepRow:
        """The next row: at most ``chunk`` tokens."""
        tokens = self.tokens
        stop = min(len(tokens), self.num_computed + chunk)
        sample = None
        if self.guide is None and self.params.grammar:
            self.guide = Guide(self.params.grammar, tuple(self.output))
        if stop == len(tokens):
            output = tuple(self.output)
            sample = SampleSpec(self.params, len(output), self.prompt, output, self.guide)
        targets: Sequence[int] = ()
        if self.params.prompt_logprobs is not None and self.num_computed < len(self.prompt):
            targets = self.prompt[self.num_computed + 1 : stop + 1]
        return StepRow(
            tokens[self.num_computed : stop],
            self.num_computed,
            self.block_table,
            sample,
            self.params.prompt_logprobs,
            targets,
        )

    def commit(self, row: StepRow, result: RowResult) -> None:
        """Take in what a step said."""
        self.num_computed += len(row.token_ids)
        if row.prompt_targets:
            self.prompt_results.append(result)
        if row.sample is not None:
            self.output.append(result.token_id)
            self.results.append(result)


class Driver:
    """Hands out shuffled blocks and steps sequences together, never more than the pool holds."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self._random = random.Random(seed)
        self._free = list(range(engine.num_blocks))
        self._random.shuffle(self._free)

    def start(self, prompt: Sequence[int], params: SamplingParams) -> Running:
        """Make a sequence with blocks for all it may grow to."""
        size = self.engine.block_size
        count = -(-(len(prompt) + params.max_tokens) // size)
        table = [self._free.pop() for _ in range(count)]
        return Running(list(prompt), params, table)

    def finish(self, sequence: Running) -> None:
        """Give the blocks back."""
        self._free += sequence.block_table
        self._random.shuffle(self._free)

    def run_alone(
        self, prompt: Sequence[int], params: SamplingParams, *, chunk: int = 1 << 30
    ) -> Running:
        """Run one sequence to its end."""
        sequence = self.start(prompt, params)
        while not sequence.is_done:
            row = sequence.row(chunk)
            sequence.commit(row, self.engine.step([row])[0])
        self.finish(sequence)
        return sequence

    def run_mixed(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        max_chunk: int,
        max_rows: int = 6,
    ) -> list[Running]:
        """Run all, with random admission, chunk sizes and row order; each once per step."""
        sequences = [self.start(p, q) for p, q in zip(prompts, params, strict=True)]
        waiting = list(sequences)
        running: list[Running] = []
        while waiting or running:
            while waiting and (not running or len(running) < max_rows):
                running.append(waiting.pop(0))
                if self._random.random() < 0.3:
                    break
            self._random.shuffle(running)
            rows = [one.row(self._random.randint(1, max_chunk)) for one in running]
            for one, row, result in zip(running, rows, self.engine.step(rows), strict=True):
                one.commit(row, result)
            for one in [one for one in running if one.is_done]:
                self.finish(one)
                running.remove(one)
        return sequences


def greedy(n: int, **others: object) -> SamplingParams:
    """Greedy decoding of n tokens that no end of sequence cuts short."""
    return SamplingParams(max_tokens=n, ignore_eos=True, **others)  # type: ignore[arg-type]
