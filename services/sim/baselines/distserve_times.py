"""DistServe's time model: three fitted coefficients a phase (OSDI'24, appendix A).

    prefill of a stage, ms = (a + b * sum(len) + c * sum(len^2)) / pp + pp
    decode of a stage, ms  = (a + b * sum(context + 1) + c * batch) / pp

The first stage of a pipeline adds 2 ms and 0.1 us for every token of context (without the + 1).
The order of the operations is kept: results are compared to the last printed decimal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

FIRST_STAGE_MS: Final = 2
FIRST_STAGE_MS_PER_TOKEN: Final = 0.0001

Triple = tuple[float, float, float]


class Coefficients(msgspec.Struct, frozen=True):
    """The fits of one model at one degree of tensor parallelism, under the names of their file.

    large_from: batches of so many sequences use ``decode_large``.
    """

    prefill: Triple
    decode_small: Triple = msgspec.field(name="decoding_smallbs")
    decode_large: Triple = msgspec.field(name="decoding_largebs")
    large_from: int = msgspec.field(name="decoding_large_small_bs_threshold")

    def prefill_ms(self, num_tokens: int, num_squared: int, pp: int) -> float:
        """Time of one stage for prompts with this sum of lengths, and of their squares."""
        a, b, c = self.prefill
        return (a + b * num_tokens + c * num_squared) * (1 / pp) + pp

    def decode_ms(self, batch: int, num_tokens: int, pp: int) -> float:
        """Time of one stage for a step of ``batch`` sequences; num_tokens: sum(context + 1)."""
        a, b, c = self.decode_small if batch < self.large_from else self.decode_large
        return (a + b * num_tokens + c * batch) * (1 / pp)


def first_stage_ms(num_context: int) -> float:
    """What an iteration of the first stage costs beside its computation."""
    return FIRST_STAGE_MS + num_context * FIRST_STAGE_MS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class Degree:
    """Tensor and pipeline parallelism of one instance: it takes tp x pp devices."""

    tp: int
    pp: int

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp{self.tp},pp{self.pp}"


@dataclass(frozen=True, slots=True)
class DistServeTimes:
    """DistServe's fits of one model and degree: the way through all ``pp`` stages, prompts in one
    batch and rows in one for each stage. A step of both kinds, which theirs never has, takes what
    its prompts and its decodes take, and one constant."""

    fits: Coefficients
    source: str
    pp: int = 1

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel. Of whole prompts, the sum of squares is 2 x attended - tokens."""
        total_ms, pp = 0.0, self.pp
        if num_prompt:
            total_ms = pp * self.fits.prefill_ms(num_prompt, 2 * num_attended - num_prompt, pp)
        if num_rows:
            in_stage = math.ceil(num_rows / pp)
            num_rows, num_context = in_stage, num_context * in_stage // num_rows
            decode_ms = pp * self.fits.decode_ms(num_rows, num_context, pp)
            if num_prompt:
                small = num_rows < self.fits.large_from
                decode_ms -= (self.fits.decode_small if small else self.fits.decode_large)[0]
            total_ms += decode_ms
        # The first stage's share counts contexts without the + 1 of each row in num_context.
        return (total_ms + first_stage_ms(num_prompt + num_context - num_rows)) / 1000

    def warnings(self) -> list[str]:
        return []
