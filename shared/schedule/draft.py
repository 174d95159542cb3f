"""A step's plan while the scheduler writes it: rows from sequences, and what is left of the budget.

Decides nothing about who runs; knows what a row of a sequence looks like.
"""

from __future__ import annotations

from shared.schedule.plan import Failure, Span, StepPlan
from shared.schedule.sequence import Sequence
from shared.step import SampleSpec, StepRow


class Draft:
    """A plan under construction, within one step's token budget."""

    def __init__(self, token_budget: int) -> None:
        self.rows: list[StepRow] = []
        self.sequences: list[Sequence] = []
        self.spans: list[Span] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.failed: list[Failure] = []
        self.num_decode_rows = 0
        self.num_prefill_tokens = 0
        self._token_budget = token_budget

    @property
    def room(self) -> int:
        """Prompt tokens that still fit; 1 for the first prompt whatever the number of decode
        rows."""
        room = self._token_budget - self.num_decode_rows - self.num_prefill_tokens
        # However many sequences decode, the first prompt must not starve.
        return max(room, 0 if self.num_prefill_tokens else 1)

    def add(self, sequence: Sequence, stop: int) -> None:
        """Add the row that computes the sequence's tokens up to ``stop``, or to its end if that
        comes first."""
        start, stop = sequence.num_computed_tokens, min(stop, sequence.num_tokens)
        self.rows.append(_row(sequence, start, stop))
        self.sequences.append(sequence)
        self.spans.append(Span(start, stop))
        if sequence.is_decoding:
            self.num_decode_rows += 1
        else:
            self.num_prefill_tokens += stop - start

    def finished(self) -> StepPlan:
        """Return the plan."""
        return StepPlan(
            rows=tuple(self.rows),
            sequences=tuple(self.sequences),
            spans=tuple(self.spans),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            failed=tuple(self.failed),
            num_decode_rows=self.num_decode_rows,
            num_prefill_tokens=self.num_prefill_tokens,
        )


def _row(sequence: Sequence, start: int, stop: int) -> StepRow:
    sample, prompt_logprobs, targets = None, None, ()
    if stop == sequence.num_tokens:
        prompt, output = (), ()
        if sequence.sampling.needs_history:
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            output = sequence.tokens[sequence.num_prompt_tokens :]
        sample = SampleSpec(sequence.sampling, sequence.num_output_tokens, prompt, output)
    if wants_prompt_logprobs(sequence):
        prompt_logprobs = sequence.sampling.prompt_logprobs
        targets = sequence.tokens[start + 1 : min(stop + 1, sequence.num_prompt_tokens)]
    return StepRow(
        token_ids=sequence.tokens[start:stop],
        start=start,
        block_table=sequence.block_table,
        sample=sample,
        prompt_logprobs=prompt_logprobs,
        prompt_targets=targets,
    )


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    """Whether prompt logprobs are still owed: they go out with the first token of the answer."""
    return sequence.sampling.prompt_logprobs is not None and sequence.num_output_tokens == 0
