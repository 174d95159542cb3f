"""Two lines through a machine's steps: what a profile knows of them, and how well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from shared.predict.least_squares import LeastSquares

HELD_OUT: Final = 5
"""Every so manieth step is predicted before it is fitted: 80 to 20."""

LEAST_STEPS: Final = 5

_Amount = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]


class StepSample(NamedTuple):
    """One step as it was measured; the first two are of all its rows together."""

    num_tokens: int
    num_attended: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPhase:
    """A line through measured steps of one kind, and how far it can be believed.

    constant_s, token_s, attended_s: of a step, of each of its tokens, of each position attended to.
    error: mean of |predicted - seen| / seen of steps that were not fitted. most_tokens,
    most_attended: of the largest step measured. steps: those that the line is through, where they
    are known.
    """

    constant_s: _Amount
    token_s: _Amount
    attended_s: _Amount
    error: _Amount
    num_steps: _Count
    most_tokens: _Count
    most_attended: _Count
    steps: tuple[StepSample, ...] = ()

    def seconds(self, num_tokens: int, num_attended: int) -> float:
        """Return what the line says."""
        return self.constant_s + self.token_s * num_tokens + self.attended_s * num_attended


def fit_steps(samples: Sequence[StepSample]) -> FittedPhase:
    """Return the line through steps of one kind, and its mean error on a fifth of them that a fit
    of the others predicts.

    Raises ValueError: fewer than ``LEAST_STEPS``, or one that took no time.
    """
    if len(samples) < LEAST_STEPS:
        raise ValueError(f"{len(samples)} steps were measured, {LEAST_STEPS} are the least")
    if any(sample.seconds <= 0 for sample in samples):
        raise ValueError("a step took no time")
    # The outermost shapes are fitted: a prediction between them is what a profile is for.
    ordered = sorted(samples)
    places = range(len(ordered))
    is_held = [place % HELD_OUT == HELD_OUT // 2 for place in places]
    seen = [sample for sample, held in zip(ordered, is_held, strict=True) if not held]
    held_out = [sample for sample, held in zip(ordered, is_held, strict=True) if held]
    a, b, c = line_through(seen)
    errors = [
        abs(a + b * num_tokens + c * num_attended - seconds) / seconds
        for num_tokens, num_attended, seconds in held_out
    ]
    constant_s, token_s, attended_s = line_through(ordered)
    return FittedPhase(
        constant_s=constant_s,
        token_s=token_s,
        attended_s=attended_s,
        error=sum(errors) / len(errors),
        num_steps=len(ordered),
        most_tokens=max(sample.num_tokens for sample in ordered),
        most_attended=max(sample.num_attended for sample in ordered),
        steps=tuple(samples),
    )


def line_through(samples: Sequence[StepSample]) -> tuple[float, float, float]:
    """Return a constant, and what a token and a position attended to take."""
    line = LeastSquares(3, keep=1.0, in_order=True)
    for sample in samples:
        line.observe((1.0, sample.num_tokens, sample.num_attended), sample.seconds)
    constant, token, attended = line.solve()
    return constant, token, attended
