"""DistServe's fits behind the interface of ``shared/predict/times.py``."""

from __future__ import annotations

from dataclasses import dataclass

from services.sim.baselines.distserve_times import Coefficients, first_stage_ms


@dataclass(frozen=True, slots=True)
class DistServeTimes:
    """DistServe's fits of one model and degree, without pipelines. A step of both kinds, which
    theirs never has, takes what its prompts and its decodes take, and one constant."""

    fits: Coefficients
    source: str

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel. Of whole prompts, the sum of squares is 2 x attended - tokens."""
        total_ms = 0.0
        if num_prompt:
            total_ms = self.fits.prefill_ms(num_prompt, 2 * num_attended - num_prompt, 1)
        if num_rows:
            decode_ms = self.fits.decode_ms(num_rows, num_context, 1)
            if num_prompt:
                small = num_rows < self.fits.large_from
                decode_ms -= (self.fits.decode_small if small else self.fits.decode_large)[0]
            total_ms += decode_ms
        # The first stage's share counts contexts without the + 1 of each row in num_context.
        return (total_ms + first_stage_ms(num_prompt + num_context - num_rows)) / 1000

    def warnings(self) -> list[str]:
        return []
