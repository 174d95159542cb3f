"""How long a step will take: a line through the recent ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.step import StepRow

_KEEP = 0.98
"""Weight of the past per step: about the last 50 steps count."""

_MIN_STEPS = 8


class StepTimeModel:
    """Weighted least squares over (1, tokens, context tokens), forgetting old steps.

    A step costs a constant (weights read, launches), something per token (products) and something
    per token of KV that is read. Asked on another thread than it learns on: a torn read can only
    mix two neighbouring fits.
    """

    def __init__(self) -> None:
        # Upper triangle of the normal matrix and the right side, plain numbers: a step notes itself
        # between two kernels, and numpy or a loop would take longer for nine of them.
        self._normal = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._right = (0.0, 0.0, 0.0)
        self._coefficients: np.ndarray | None = None
        self._num_steps = 0

    def observe(self, num_tokens: int, num_context: int, seconds: float) -> None:
        """Take note of a finished step."""
        one, tokens, context = _features(num_tokens, num_context)
        a, b, c, d, e, f = self._normal
        self._normal = (
            a * _KEEP + one,
            b * _KEEP + tokens,
            c * _KEEP + context,
            d * _KEEP + tokens * tokens,
            e * _KEEP + tokens * context,
            f * _KEEP + context * context,
        )
        u, v, w = self._right
        self._right = (
            u * _KEEP + seconds,
            v * _KEEP + tokens * seconds,
            w * _KEEP + context * seconds,
        )
        self._num_steps += 1
        self._coefficients = None

    def predict(self, num_tokens: int, num_context: int) -> float:
        """Return seconds, never negative; 0 until enough steps were seen."""
        if self._num_steps < _MIN_STEPS:
            return 0.0
        coefficients = self._coefficients
        if coefficients is None:
            # A little ridge: all steps so far may have had the same shape.
            a, b, c, d, e, f = self._normal
            normal = np.array([[a, b, c], [b, d, e], [c, e, f]])
            ridge = np.eye(3) * 1e-6 * max(1.0, a + d + f)
            coefficients = np.linalg.solve(normal + ridge, np.array(self._right))
            self._coefficients = coefficients
        return max(0.0, float(np.dot(_features(num_tokens, num_context), coefficients)))


def _features(num_tokens: int, num_context: int) -> tuple[float, float, float]:
    # Scaled to the same order of magnitude, so that the ridge weighs them alike.
    return 1.0, num_tokens / 64, num_context / 4096


def step_size(rows: Sequence[StepRow]) -> tuple[int, int]:
    """Tokens computed, and tokens of KV read."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    return num_tokens, num_tokens + sum(row.start for row in rows)
