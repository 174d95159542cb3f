"""What a machine can do with a model, as far as decisions need it, and how samples become that.

Pure. ``measure.py`` takes the samples, ``kept.py`` keeps the outcome from one start to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

PLATEAU_SHARE = 0.9
"""Of the best tokens/s: from here on a longer prompt gains too little for others to wait for it."""

_Amount = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]

Sample = tuple[_Count, _Amount]
"""Tokens of one prompt, and the seconds that its step took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What was measured. 0 = not measured, and then nothing is decided by it.

    saturating_tokens: prompt tokens that keep the device busy: a step of more takes longer by what
    they take alone, so that prompts gain nothing by sharing it (L_m of DistServe, OSDI 2024, 4.3).
    tokens_per_s: of the best length. message_s: what a frame costs beside its bytes, when it goes
    alone. interference: share of a step's speed that is lost while KV is copied beside it, below 1.
    samples: of the sweep, shortest first.
    """

    saturating_tokens: _Count = 0
    tokens_per_s: _Amount = 0.0
    message_s: _Amount = 0.0
    interference: _Amount = 0.0
    samples: tuple[Sample, ...] = ()


UNMEASURED = MachineProfile()


def saturating_tokens(samples: Sequence[Sample]) -> int:
    """Return the shortest length that reaches ``PLATEAU_SHARE`` of the best tokens/s; where speed
    rose to the end, that is near the longest length tried, and more may be right."""
    best = tokens_per_s(samples)
    return next(count for count, seconds in samples if count / seconds >= PLATEAU_SHARE * best)


def tokens_per_s(samples: Sequence[Sample]) -> float:
    """Return the speed of the quickest length."""
    return max(num_tokens / seconds for num_tokens, seconds in samples)


def interference(alone_s: Sequence[float], beside_s: Sequence[float]) -> float:
    """Return the share of its speed that a step loses beside copies: the seconds that it ends later
    for each second that they go on. By the quickest of each: what else the machine does only ever
    slows a step, and is not ours to keep."""
    return max(0.0, 1.0 - min(alone_s) / min(beside_s))
