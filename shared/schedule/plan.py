"""What a scheduler says: the plan of one step, and what came of it. Records only.

Vocabulary: *plan* -> run -> *commit* (docs/glossary.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import InvalidRequest, MeshError
from shared.request import FinishReason, TokenLogprobs
from shared.schedule.sequence import Sequence
from shared.step import StepRow, ToCome


class Failure(NamedTuple):
    """A sequence that can never run here. Its blocks are free already."""

    sequence: Sequence
    error: MeshError

    @classmethod
    def of_grammar(cls, sequence: Sequence, reason: str) -> Failure:
        """Of an answer whose grammar can say nothing more; its blocks go with its last step."""
        error = InvalidRequest(
            f"after {sequence.num_output_tokens} tokens the answer's grammar cannot be followed "
            f"any more ({reason}): make it simpler",
            code="grammar_failed",
        )
        return cls(sequence, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. ``rows[i]`` computes tokens of ``sequences[i]``; decode rows first, then prompt
    chunks.

    The rows share the sequences' block tables and are valid until ``commit``.
    admitted: sequences that got blocks in this plan: KV of their tokens [0, num_computed_tokens) is
    there already.
    preempted: lost their blocks and wait for recompute. failed: tell their owners now, even if
    there are no rows. num_attended: positions that all its tokens together attend to. to_come: of a
    step planned ahead, the tokens that its rows still lack.
    """

    rows: tuple[StepRow, ...]
    sequences: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    failed: tuple[Failure, ...]
    num_decode_rows: int
    num_prefill_tokens: int
    num_attended: int
    to_come: ToCome = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run; such a plan is not committed."""
        return not self.rows


@dataclass(slots=True, eq=False)  # one a row and step: frozen costs three times as much to make
class NewToken:
    """A token sampled in a step. index: in the answer. finish_reason: NONE unless the answer ends
    here.
    prompt_logprobs: with a prompt's first token if asked for, one entry per prompt token, the first
    NaN."""

    sequence: Sequence
    token_id: int
    index: int
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...]


class PromptTimes(NamedTuple):
    """How a prompt was computed, in seconds. queue_s: arrival until the first step that computes
    it. compute_s: from there to the first token. fetched_tokens: of the cached ones, those that
    another worker sent for it, in fetch_s of the queue's time; dram_tokens, ssd_tokens: those that
    came from below the pool, in load_s of it."""

    queue_s: float
    compute_s: float
    cached_tokens: int
    fetched_tokens: int = 0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    dram_tokens: int = 0
    ssd_tokens: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a committed step gave, in row order; sequences that ended or were aborted meanwhile do
    not appear. failed: tell their owners; they will not run again."""

    tokens: tuple[NewToken, ...]
    failed: tuple[Failure, ...] = ()


class SchedulerStatistics(NamedTuple):
    """Gauges: num_waiting, num_running, num_held (prefilled, KV still being pushed), num_stalled
    (running, but without room in the last plan), pending_tokens (without KV, of waiting and running
    sequences). Counters: num_steps, num_preemptions, num_recomputed_tokens (KV lost to
    preemption)."""

    num_waiting: int
    num_running: int
    num_held: int
    num_stalled: int
    pending_tokens: int
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int
