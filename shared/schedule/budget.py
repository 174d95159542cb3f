"""How much prompt a step may compute beside the tokens that running sequences get. Pure.

Stall-free batching (Sarathi-Serve, OSDI'24, Algorithm 3) gives prompts what is left of a token
budget. The budget is a number, or follows from how long a step may take: Sarathi profiles batches
once and takes the largest one within the target for the time between tokens; ``TimeBudget`` asks
the same model for each step anew, because attention makes a chunk dearer the deeper it lies in its
prompt, and contexts of running sequences cost time as well. Nor is a target kept that is nobody's:
while no sequence decodes, the first prompt is computed as a whole, as a prefill worker does it.
Where answers alone take longer than the target, or more than half of one that nobody has chosen, a
prompt gets as much time as they do: in tiles it would wait for dozens of their steps, and all
prompts together for hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.predict.step_time import PredictStep, attended

LEAST_CHUNK = 16
"""Tokens that the first prompt of a step gets however late other sequences are: a step costs as
much with one token more as with these."""

TBT_TARGET_S = 0.05
"""How long a step beside answers takes if nobody says otherwise."""

TILE = 16
"""Larger chunks are cut to a multiple: matrix kernels cost the whole tile."""


class StepBudget(Protocol):
    """Asked for one chunk after the other while a step is planned."""

    def least(self, num_decodes: int, num_attended: int, start: int) -> int:
        """Return how many tokens of its first prompt, from position ``start`` on, a step takes even
        if there is no room, beside the next tokens of ``num_decodes`` sequences, which attend to
        ``num_attended`` positions: it must not starve."""
        ...

    def room(self, num_tokens: int, num_attended: int, start: int) -> int:
        """Return how many tokens of a prompt, from position ``start`` on, fit beside ``num_tokens``
        which attend to ``num_attended`` positions; not above 0 if none."""
        ...


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """At most so many tokens a step."""

    max_tokens: int

    def least(self, num_decodes: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return 1

    def room(self, num_tokens: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return self.max_tokens - num_tokens


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """At most ``max_tokens``, and prompts share a step only up to ``saturating_tokens`` in all; of
    one that is too long for that, its first tokens fill the step up.

    Beyond that a step takes as long as its prompts one after the other, and each would wait for
    all. DistServe (OSDI'24, 4.3) batches whole prompts to a total near L_m so.
    """

    max_tokens: int
    saturating_tokens: int

    def least(self, num_decodes: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return 1

    def room(self, num_tokens: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        if not num_tokens:
            return self.max_tokens
        room = min(self.max_tokens, self.saturating_tokens) - num_tokens
        return room if room >= TILE else 0


@dataclass(frozen=True, slots=True)
class TimeBudget:
    """As many tokens as keep the predicted time of the step within ``target_s``, and at most
    ``max_tokens``; these for the first prompt if no sequence decodes and none is expected.

    is_expecting: whether a sequence that decodes is likely to join while the step runs, and would
    wait for its end. is_chosen: somebody asked for this very target.
    """

    predict: PredictStep
    target_s: float
    max_tokens: int
    is_expecting: Callable[[], bool]
    is_chosen: bool = True

    def least(self, num_decodes: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        if not num_decodes and not self.is_expecting():
            return self.max_tokens
        alone_s = self.predict(num_decodes, num_attended)
        if (alone_s if self.is_chosen else 2 * alone_s) <= self.target_s:
            return LEAST_CHUNK
        return max(LEAST_CHUNK, self._most(2 * alone_s, num_decodes, num_attended, start))

    def room(self, num_tokens: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return self._most(self.target_s, num_tokens, num_attended, start)

    def _most(self, target_s: float, num_tokens: int, num_attended: int, start: int) -> int:
        def seconds(size: int) -> float:
            return self.predict(num_tokens + size, num_attended + attended(start, start + size))

        fits, too_many = 0, self.max_tokens - num_tokens + 1
        if too_many < 2 or (least_s := seconds(0)) > target_s:
            return 0
        tries: list[int] = []
        if (most_s := seconds(too_many)) > target_s:
            # Times of steps are nearly a line: look where it would end, and beside it.
            at = int(too_many * (target_s - least_s) / (most_s - least_s))
            tries = [at + 1, at]
        while too_many - fits > 1:
            middle = tries.pop() if tries else (fits + too_many) // 2
            if not fits < middle < too_many:
                continue
            if seconds(middle) <= target_s:
                fits = middle
            else:
                too_many = middle
        return fits - fits % TILE if fits > TILE else fits


@dataclass(frozen=True, slots=True)
class EitherBudget:
    """Of a worker that may be either: ``beside`` while it has answers in hand, else ``alone``.

    A mixed machine of Splitwise (arXiv 2311.18677, 4.1) whose steps keep to the target for the time
    between tokens, and at home in the prompt pool a prefill worker like any other.
    """

    alone: StepBudget
    beside: StepBudget
    has_answers: Callable[[], bool]

    @property
    def _now(self) -> StepBudget:
        return self.beside if self.has_answers() else self.alone

    def least(self, num_decodes: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return self._now.least(num_decodes, num_attended, start)

    def room(self, num_tokens: int, num_attended: int, start: int) -> int:
        """See ``StepBudget``."""
        return self._now.room(num_tokens, num_attended, start)


def budget_of(
    most_tokens: int,
    *,
    together: int,
    pushes: bool,
    tbt_target_s: float | None,
    predict: PredictStep,
    is_expecting: Callable[[], bool],
    has_answers: Callable[[], bool],
) -> StepBudget:
    """Return what bounds a worker's step: prompts alone by what keeps the device busy, prompts
    beside answers by time.

    together: tokens of prompts that share a step, on a worker that ``pushes``. tbt_target_s: of a
    step beside answers; 0 = nobody has chosen one, None = there are none, or tokens alone count.
    """
    alone: StepBudget = BatchBudget(most_tokens, together) if pushes else TokenBudget(most_tokens)
    if tbt_target_s is None:
        return alone
    beside = TimeBudget(
        predict,
        tbt_target_s or TBT_TARGET_S,
        most_tokens,
        is_expecting=is_expecting,
        is_chosen=tbt_target_s > 0,
    )
    return EitherBudget(alone, beside, has_answers) if pushes else beside
