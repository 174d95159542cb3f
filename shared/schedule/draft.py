"""A step's plan while the scheduler writes it: rows from sequences, and what is left of the budget.

Decides nothing about who runs; knows what a row of a sequence looks like.
"""

from __future__ import annotations

from shared.errors import InvariantViolated
from shared.predict.step_time import attended
from shared.request import TokenLogprobs
from shared.schedule.budget import StepBudget
from shared.schedule.plan import Failure, StepPlan
from shared.schedule.sequence import Sequence
from shared.step import RowResult, SampleSpec, StepRow

_NAN = float("nan")

NOT_YET = -1
"""Where the token of the running step goes; no engine takes it for a token."""


class Draft:
    """A plan under construction, within one step's budget."""

    def __init__(self, budget: StepBudget) -> None:
        self.rows: list[StepRow] = []
        self.sequences: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.failed: list[Failure] = []
        self.num_decode_rows = 0
        self.num_prefill_tokens = 0
        self._to_come: list[tuple[list[int], int]] = []
        self._num_attended = 0
        self._budget = budget

    def room(self, start: int) -> int:
        """Return how many tokens of a prompt, from position ``start`` on, still fit."""
        num_tokens = self.num_decode_rows + self.num_prefill_tokens
        room = self._budget.room(num_tokens, self._num_attended, start)
        if self.num_prefill_tokens:
            return room
        return max(room, self._budget.least(self.num_decode_rows, self._num_attended, start))

    def add(self, sequence: Sequence, stop: int) -> None:
        """Add the row that computes the sequence's tokens up to ``stop``, or to its end if that
        comes first."""
        start, stop = sequence.num_computed_tokens, min(stop, sequence.num_tokens)
        self.rows.append(_row(sequence, start, stop))
        self.sequences.append(sequence)
        self._num_attended += attended(start, stop)
        if sequence.is_decoding:
            self.num_decode_rows += 1
        else:
            self.num_prefill_tokens += stop - start

    def add_next(self, sequence: Sequence) -> None:
        """Add the row of a decoding sequence, its last token: ``add`` without what prompts need,
        for these are nearly all the rows there are."""
        sampling, tokens = sequence.item.sampling, sequence.tokens
        start = len(tokens) - 1
        if sampling.needs_history:
            self.add(sequence, start + 1)
            return
        index = start + 1 - sequence.item.num_prompt_tokens
        sample = SampleSpec(sampling, index, (), (), sequence.guide)
        self.rows.append(StepRow(tokens[start:], start, sequence.block_table, sample))
        self.sequences.append(sequence)
        self._num_attended += attended(start, start + 1)
        self.num_decode_rows += 1

    def add_after(self, sequence: Sequence, source: int) -> None:
        """Add the row of the token that comes after the one that row ``source`` of the running step
        samples for this sequence. Not for one whose sampling looks at the answer so far."""
        start = len(sequence.tokens)
        index = start + 1 - sequence.item.num_prompt_tokens
        token_ids = [NOT_YET]
        sample = SampleSpec(sequence.item.sampling, index, (), (), sequence.guide)
        self.rows.append(StepRow(token_ids, start, sequence.block_table, sample))
        self.sequences.append(sequence)
        self._to_come.append((token_ids, source))
        self._num_attended += attended(start, start + 1)
        self.num_decode_rows += 1

    def finished(self) -> StepPlan:
        """Return the plan."""
        return StepPlan(
            rows=tuple(self.rows),
            sequences=tuple(self.sequences),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            failed=tuple(self.failed),
            num_decode_rows=self.num_decode_rows,
            num_prefill_tokens=self.num_prefill_tokens,
            num_attended=self._num_attended,
            to_come=self._to_come,
        )


def _row(sequence: Sequence, start: int, stop: int) -> StepRow:
    sample, prompt_logprobs, targets = None, None, ()
    if stop == sequence.num_tokens:
        prompt, output = (), ()
        if sequence.sampling.needs_history:
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            output = sequence.tokens[sequence.num_prompt_tokens :]
        index = sequence.num_output_tokens
        sample = SampleSpec(sequence.sampling, index, prompt, output, sequence.guide)
    if sequence.owes_prompt_logprobs:
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


def collect_prompt_logprobs(sequence: Sequence, row: StepRow, result: RowResult) -> None:
    """Keep those of a row until the answer's first token.

    Raises InvariantViolated: not one for each target.
    """
    if len(result.prompt_logprobs) != len(row.prompt_targets):
        raise InvariantViolated(
            f"{len(row.prompt_targets)} prompt logprobs were asked for, "
            f"{len(result.prompt_logprobs)} came"
        )
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(TokenLogprobs(_NAN))  # nothing predicts the first token
    sequence.prompt_logprobs.extend(result.prompt_logprobs)
