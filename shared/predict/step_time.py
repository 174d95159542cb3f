"""How long a step will take: a constant (weights read, launches), so much a token (products), and
so much a position that is attended to (KV read).

The shape comes from a profile, if there was one, and from the last steps; what else the machine
does meanwhile is one factor, the level, which follows within a few steps. Who learns also keeps
the error of what it would have said just before, so that who is told may judge it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shared.predict.least_squares import LeastSquares
from shared.predict.quantiles import RunningQuantiles

PredictStep = Callable[[int, int], float]
"""(tokens computed, positions attended to by all of them together) -> seconds; grows with both."""

MIN_STEPS = 8
"""Steps before anything is predicted."""

_REFIT_STEPS = 4
"""Steps between two fits: a fit costs more than all else here."""

_LEVEL_STEPS = 15
"""Steps whose median is the level: what disturbs a few of them does not count."""

_FARTHEST = 4.0
"""Most that one step may claim to differ from its prediction: one that stood still says nothing."""

_NUM_ERRORS = 64

_MEAN_STEPS = 256
"""About so many steps count in the mean."""


def attended(start: int, stop: int) -> int:
    """Return how many positions tokens [start, stop) of one sequence attend to, all together."""
    return (stop - start) * (start + stop + 1) // 2


class StepFit(NamedTuple):
    """What is known of one kind of steps; fit to be sent.

    error_p50, error_p90: of the last steps, |predicted - real| / real, each predicted before it was
    learned. num_steps: learned in all, those of a profile included. mean_ratio: what steps take in
    the mean, times what this predicts, which is the ordinary step of the last few: sums of many
    steps need the mean. most_tokens, most_attended: of the largest steps learned, 0 = not known.
    """

    constant_s: float = 0.0
    token_s: float = 0.0
    attended_s: float = 0.0
    num_steps: int = 0
    error_p50: float = 0.0
    error_p90: float = 0.0
    mean_ratio: float = 1.0
    most_tokens: int = 0
    most_attended: int = 0

    @property
    def is_known(self) -> bool:
        """Whether it predicts anything."""
        has_time = self.constant_s > 0 or self.token_s > 0 or self.attended_s > 0
        return has_time and self.num_steps >= MIN_STEPS

    def seconds(self, num_tokens: int, num_attended: int) -> float:
        """Predict a step."""
        return self.constant_s + self.token_s * num_tokens + self.attended_s * num_attended

    def prompt_seconds(self, start: int, stop: int, step_tokens: int) -> float:
        """Predict a prompt's tokens [start, stop) alone, in steps of at most ``step_tokens``; 0 =
        however many."""
        num_tokens = stop - start
        if num_tokens <= 0:
            return 0.0
        num_steps = -(-num_tokens // step_tokens) if step_tokens else 1
        return (num_steps - 1) * self.constant_s + self.seconds(num_tokens, attended(start, stop))


NO_FIT = StepFit()


class StepTimeModel:
    """Learns one kind of steps and predicts them. 0 until ``MIN_STEPS`` were seen."""

    def __init__(self) -> None:
        # Else of steps that were all alike a third would pass for the price of a position, and
        # what is far longer than they were would never be let in, to be learned from.
        self._line = LeastSquares(3, in_order=True)
        self._coefficients = (0.0, 0.0, 0.0)
        self._level = 1.0
        self._last: deque[tuple[int, int, float]] = deque(maxlen=_LEVEL_STEPS)
        self._mean_level = 1.0
        self._num_levels = 0
        self._num_steps = 0
        self._num_unfitted = 0
        self._most_tokens = self._most_attended = 0
        self._errors = RunningQuantiles(_NUM_ERRORS)

    def profiled(self) -> None:
        """All that was observed until now is a profile: kept for good, and no measure of errors."""
        if self._num_steps:
            self._num_steps = max(self._num_steps, MIN_STEPS)
            self._line.anchor()
            self._last.clear()
            self._fit()
            self._level = 1.0
            self._mean_level, self._num_levels = 1.0, 0
            self._errors = RunningQuantiles(_NUM_ERRORS)

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Take note of a finished step; one that took no time is none."""
        if seconds <= 0:
            return
        shape_s = self._shape_s(num_tokens, num_attended) if self.is_known else 0.0
        if shape_s > 0:
            predicted_s = shape_s * self._level
            self._errors.add(abs(predicted_s - seconds) / seconds)
            seconds = min(max(seconds, predicted_s / _FARTHEST), predicted_s * _FARTHEST)
            self._last.append((num_tokens, num_attended, seconds))
            self._level = self._median_ratio()
            self._num_levels = min(self._num_levels + 1, _MEAN_STEPS)
            self._mean_level += (seconds / shape_s - self._mean_level) / self._num_levels
        self._line.observe((1.0, num_tokens, num_attended), seconds)
        self._num_steps += 1
        self._num_unfitted += 1
        self._most_tokens = max(self._most_tokens, num_tokens)
        self._most_attended = max(self._most_attended, num_attended)
        if self._num_unfitted >= _REFIT_STEPS:
            self._fit()

    @property
    def is_known(self) -> bool:
        """Whether enough was seen."""
        return self._num_steps >= MIN_STEPS

    def predict(self, num_tokens: int, num_attended: int) -> float:
        """Return seconds, never negative; 0 until enough steps were seen."""
        return self._level * self._shape_s(num_tokens, num_attended) if self.is_known else 0.0

    def fit(self) -> StepFit:
        """Return what is known now."""
        constant_s, token_s, attended_s = self._coefficients
        return StepFit(
            constant_s * self._level,
            token_s * self._level,
            attended_s * self._level,
            self._num_steps,
            self._errors.quantile(0.5),
            self._errors.quantile(0.9),
            self._mean_level / self._level,
            self._most_tokens,
            self._most_attended,
        )

    def _shape_s(self, num_tokens: int, num_attended: int) -> float:
        constant_s, token_s, attended_s = self._coefficients
        return constant_s + token_s * num_tokens + attended_s * num_attended

    def _median_ratio(self) -> float:
        ratios = sorted(
            seconds / shape_s
            for num_tokens, num_attended, seconds in self._last
            if (shape_s := self._shape_s(num_tokens, num_attended)) > 0
        )
        return ratios[(len(ratios) - 1) // 2] if ratios else 1.0

    def _fit(self) -> None:
        a, b, c = self._line.solve()
        self._coefficients = a, b, c
        self._num_unfitted = 0
        # What the shape has taken up now is no level any more.
        before, self._level = self._level, self._median_ratio()
        self._mean_level *= self._level / before
