"""How long answers become: running quantiles by the length of the prompt.

What an answer's real length will be is nobody's to know before its end: only answers that ended
are looked at.
"""

from __future__ import annotations

from shared.predict.quantiles import RunningQuantiles

_SIZE = 256
"""The last answers that count, of all and of each bucket."""

_LEAST = 8
"""Fewer answers than this say nothing."""


class OutputLengths:
    """Quantiles of answers' lengths. Prompts of 2^k up to 2^(k+1) tokens share a bucket."""

    def __init__(self) -> None:
        self._all = RunningQuantiles(_SIZE)
        self._by_bucket: dict[int, RunningQuantiles] = {}

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Take in a whole answer."""
        bucket = num_prompt_tokens.bit_length()
        own = self._by_bucket.setdefault(bucket, RunningQuantiles(_SIZE))
        for known in (self._all, own):
            known.add(num_output_tokens)

    def quantile(self, num_prompt_tokens: int, share: float) -> float | None:
        """Return how long the shorter ``share`` of such answers are at most: of their bucket, else
        of all; None = too few have ended."""
        for known in (self._by_bucket.get(num_prompt_tokens.bit_length()), self._all):
            if known is not None and len(known) >= _LEAST:
                return known.quantile(share)
        return None
