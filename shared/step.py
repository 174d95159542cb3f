"""The words of one step: what a scheduler asks of an engine, and what comes back.

Plain records, known to neither side's inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.request import SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class Guide:
    """The grammar of one answer, and where in it the answer is.

    output: tokens of the answer that earlier attempts gave. ready: what ``Engine.expect`` gave for
    it, if it was asked; the engine has room for few. state, num_taken: the engine's own, of its
    first ``num_taken`` tokens; it makes them from the rest.
    """

    grammar: str = field(repr=False)
    output: Sequence[int] = field(repr=False)
    ready: Future[Any] | None = field(default=None, init=False, repr=False)
    state: Any = field(default=None, init=False, repr=False)
    num_taken: int = field(default=0, init=False)


@dataclass(slots=True)  # not frozen: every row of every step makes one, and frozen costs double
class SampleSpec:
    """Sample one token after a row's last position.

    index: position of the token in the answer; the counter of its random number.
    prompt, output: the ids that penalties and bad words look at (only read when
    ``params.needs_history``). guide: of an answer that follows a grammar.
    """

    params: SamplingParams
    index: int
    prompt: Sequence[int]
    output: Sequence[int]
    guide: Guide | None = None

    def forbidden(self, eos_token_ids: frozenset[int]) -> set[int]:
        """Return the tokens that must not come next: those that would end the answer before
        ``min_tokens`` tokens, and the last ones of bad words that are complete but for it."""
        params, output = self.params, self.output
        ids: set[int] = set()
        if self.index < params.min_tokens:
            ids |= set(params.stop_token_ids)
            if not params.ignore_eos:
                ids |= eos_token_ids
        for word in params.bad_words:
            begun = len(word) - 1
            if not begun or tuple(output[-begun:]) == word[:-1]:
                ids.add(word[-1])
        return ids


class StepRow(NamedTuple):
    """One sequence's share of a step: a prompt chunk, or one token of a running sequence.

        tokens of the sequence   0 ......... start ............ start + len(token_ids)
                                 KV in pool  computed now       (sample: the next one)

    block_table: physical block of each logical block, long enough for ``start + len(token_ids)``
    tokens. It may grow while the step runs: slice it, never take a view of it. Nothing in it ever
    changes, so an engine may keep what it has seen of it.
    sample: None for a chunk that does not end its prompt.
    prompt_logprobs: None = off; k = logprobs of the prompt tokens that this chunk predicts, i.e. of
    tokens at positions ``start + 1 .. start + len(token_ids)`` as far as ``prompt_targets`` gives
    them. prompt_targets: the ids at those positions (one shorter on a prompt's last chunk).
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None = None
    prompt_logprobs: int | None = None
    prompt_targets: Sequence[int] = ()

    @property
    def stop(self) -> int:
        """First position that this row does not compute."""
        return self.start + len(self.token_ids)


ToCome = Sequence[tuple[list[int], int]]
"""Rows that continue rows of the step before, whose tokens nobody knows yet: the list of one id
that such a row computes, and the row of that step whose token goes into it."""


class RowResult(NamedTuple):
    """token_id: -1 if the row sampled nothing. logprobs: when the row's params asked for them.
    prompt_logprobs: one entry per prompt target. failure: why the row's grammar can say nothing
    more, '' = nothing is wrong; the token means nothing then."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str = ""
