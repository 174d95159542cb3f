"""Two lines through a machine's steps: what a profile knows of them, and how well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from shared.predict.least_squares import LeastSquares
from shared.predict.times import FittedPhase

HELD_OUT: Final = 5
"""Every so manieth step is predicted before it is fitted: 80 to 20."""

LEAST_STEPS: Final = 5


class StepSample(NamedTuple):
    """One step as it was measured; the first two are of all its rows together."""

    num_tokens: int
    num_attended: int
    seconds: float


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
    partial = line_through(seen)
    errors = [abs(_value(partial, sample) - sample.seconds) / sample.seconds for sample in held_out]
    constant_s, token_s, attended_s = line_through(ordered)
    return FittedPhase(
        constant_s=constant_s,
        token_s=token_s,
        attended_s=attended_s,
        error=sum(errors) / len(errors),
        num_steps=len(ordered),
        most_tokens=max(sample.num_tokens for sample in ordered),
        most_attended=max(sample.num_attended for sample in ordered),
    )


def line_through(samples: Sequence[StepSample]) -> tuple[float, float, float]:
    """Return a constant, and what a token and a position attended to take."""
    line = LeastSquares(3, keep=1.0)
    for sample in samples:
        line.observe((1.0, sample.num_tokens, sample.num_attended), sample.seconds)
    constant, token, attended = line.solve()
    return constant, token, attended


def _value(line: tuple[float, float, float], sample: StepSample) -> float:
    return line[0] + line[1] * sample.num_tokens + line[2] * sample.num_attended
