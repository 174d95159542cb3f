"""The token list that one request grows on a worker, how much of its KV exists, and the table of
its moves. Decides nothing.

    tokens   0 .......... num_prompt_tokens ............ num_tokens
             |--- prompt ---|---------- answer -----------|
    KV       |==== num_computed_tokens ====|-- to compute -|

Counts are derived, so none can drift.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from shared.errors import LocalProtocolError
from shared.kv.pool import BlockTable
from shared.kv.prefix_hash import PrefixChain
from shared.request import FinishReason, SamplingParams, TokenLogprobs, WorkItem
from shared.step import Guide


class SequenceState(StrEnum):
    """Where a sequence stands with its scheduler."""

    NEW = "new"  # not given to a scheduler yet
    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks and is planned
    HELD = "held"  # holds blocks and is not planned: its KV is being pushed
    FINISHED = "finished"  # holds nothing


class SequenceEvent(StrEnum):
    """What its scheduler can do to a sequence."""

    QUEUED = "queued"  # its prompt is to be computed here
    READY = "ready"  # it brings KV of its prompt
    ADMITTED = "admitted"  # it has all its blocks
    PREEMPTED = "preempted"  # an older one needs them
    KEPT = "kept"  # it runs no more, but its KV may still be being sent
    ENDED = "ended"  # it runs no more, and nobody needs its KV


_S, _E = SequenceState, SequenceEvent

MOVES: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (_S.NEW, _E.QUEUED): _S.WAITING,
    (_S.NEW, _E.READY): _S.RUNNING,
    (_S.WAITING, _E.ADMITTED): _S.RUNNING,
    (_S.WAITING, _E.KEPT): _S.HELD,
    (_S.WAITING, _E.ENDED): _S.FINISHED,
    (_S.RUNNING, _E.PREEMPTED): _S.WAITING,
    (_S.RUNNING, _E.KEPT): _S.HELD,
    (_S.RUNNING, _E.ENDED): _S.FINISHED,
    (_S.HELD, _E.ENDED): _S.FINISHED,
}
"""Every move there is."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one request on one worker; identity is the object.

    arrival: order among all sequences of a scheduler. chain: the prefix hashes of ``tokens``. Both
    are set when it is added.
    num_expected_tokens: prompt tokens that the prefix cache had when it was queued.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    awaits_prefix: its prefix is on its way from another worker; awaits_grammar: its grammar is
    being made ready. It is let in when neither is.
    steps_in_flight: planned steps, not committed yet, that read or write its blocks; while there
    are any the blocks may not be given back. guide: where the answer is in its grammar.
    """

    item: WorkItem
    tokens: list[int] = field(init=False, repr=False)
    state: SequenceState = field(default=SequenceState.NEW, init=False)
    arrival: int = field(default=-1, init=False)
    table: BlockTable | None = field(default=None, init=False, repr=False)
    chain: PrefixChain = field(init=False, repr=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_expected_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    finish_reason: FinishReason = field(default=FinishReason.NONE, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(
        default_factory=list[TokenLogprobs], init=False, repr=False
    )
    steps_in_flight: int = field(default=0, init=False)
    is_aborted: bool = field(default=False, init=False)
    is_prefill_only: bool = field(default=False, init=False)
    is_released: bool = field(default=False, init=False)
    awaits_prefix: bool = field(default=False, init=False)
    awaits_grammar: bool = field(default=False, init=False)
    guide: Guide | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.item.num_prompt_tokens <= len(self.item.token_ids):
            raise LocalProtocolError("a sequence needs a prompt of at least one token")
        self.tokens = list(self.item.token_ids)
        if self.item.sampling.grammar:
            output = self.item.token_ids[self.item.num_prompt_tokens :]
            self.guide = Guide(self.item.sampling.grammar, output)

    def move(self, event: SequenceEvent) -> None:
        """Move by the table. Raises LocalProtocolError: it has no such move."""
        after = MOVES.get((self.state, event))
        if after is None:
            raise LocalProtocolError(
                f"{event.value} is not allowed on a {self.state.value} sequence"
            )
        self.state = after

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.item.sampling

    @property
    def is_awaiting(self) -> bool:
        """Whether something is on its way without which it is not let in."""
        return self.awaits_prefix or self.awaits_grammar

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """The client's prompt."""
        return self.item.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included; the next one's index."""
        return len(self.tokens) - self.item.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens without KV; 1 while decoding, more while (re)computing a prompt."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Most tokens that may still be sampled."""
        return self.item.sampling.max_tokens - self.num_output_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether one token per step is what it needs: KV exists for all but the last of its own
        outputs."""
        num_tokens = len(self.tokens)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > len(self.item.token_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to come: with the first token of the answer."""
        return self.item.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def most_cached_tokens(self) -> int:
        """Tokens that need not be computed, if the cache has them. The last must be: its logits
        give the next. Cached KV gives no logprobs."""
        return 0 if self.owes_prompt_logprobs else len(self.tokens) - 1

    @property
    def is_over(self) -> bool:
        """Whether it ended or was aborted while steps that were planned before still have a row of
        it."""
        return self.is_aborted or self.finish_reason is not FinishReason.NONE

    @property
    def block_table(self) -> array[int]:
        """Physical block of each logical block; empty while it holds none."""
        return self.table.blocks if self.table is not None else array("i")
