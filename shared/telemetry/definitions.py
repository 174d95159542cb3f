"""What TTFT, TBT, TPOT, E2E, attainment and goodput mean here: the one module that computes them.

Definitions as in DistServe (OSDI 2024): attainment counts every submitted request, refused ones as
missed; goodput is the highest rate that still attains the target, per GPU. Other papers divide or
average differently (splitwise-sim by all tokens, Mooncake over the longest tenth of gaps), so
numbers are only compared after going through here. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


def tpot(first_at: float, last_at: float, num_tokens: int) -> float:
    """Mean gap after the first token, in the clock's unit; 0 for one token or none.

    What receipts and metrics tell (``lifetime.py``), and what a client computes.
    """
    return (last_at - first_at) / (num_tokens - 1) if num_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must meet, both of them, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One submitted request. token_times: one entry a token, ascending, on the clock of
    ``arrived_at``; empty if it was refused or failed before its first token."""

    arrived_at: float
    token_times: Sequence[float] = ()
    is_complete: bool = True

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None without a token."""
        return self.token_times[0] - self.arrived_at if self.token_times else None

    @property
    def tbt_s(self) -> list[float]:
        """The gap before each token after the first."""
        times = self.token_times
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float:
        times = self.token_times
        return tpot(times[0], times[-1], len(times)) if times else 0.0

    @property
    def itl_s(self) -> list[float]:
        """Gaps between messages, as a client sees them: tokens that came together in one message
        have equal times and no gap between them, so that they cannot make a stream look even."""
        return [gap for gap in self.tbt_s if gap > 0]

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token; None without a token."""
        return self.token_times[-1] - self.arrived_at if self.token_times else None

    def meets(self, slo: Slo) -> bool:
        """Whether it completed within both limits."""
        ttft_s = self.ttft_s
        if ttft_s is None or not self.is_complete:
            return False
        return ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


def attainment(outcomes: Sequence[RequestOutcome], slo: Slo) -> float:
    """Return the share of all submitted requests that meet the limits; 1.0 for none."""
    if not outcomes:
        return 1.0
    return sum(outcome.meets(slo) for outcome in outcomes) / len(outcomes)


def goodput(
    attained: Iterable[tuple[float, float]], *, target: float = 0.9, num_gpus: int = 1
) -> float:
    """Return the highest rate whose attainment reaches the target, per GPU; 0 if none does.

    attained: (rate, attainment) pairs, one a run. A rate counts only if all lower ones attain too,
    so that one lucky run above the knee does not.
    """
    best = 0.0
    for rate, share in sorted(attained):
        if share < target:
            break
        best = rate
    return best / num_gpus


def percentile(values: Collection[float], q: float) -> float:
    """Return the nearest-rank percentile, q in [0, 100]: always one of the values.

    Raises ValueError: no values."""
    return percentiles(values, (q,))[0]


def percentiles(values: Collection[float], qs: Sequence[float]) -> list[float]:
    """Return the nearest-rank percentile for each q; the values are sorted once.

    Raises ValueError: no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    ranks = [int(-(-len(ordered) * q // 100)) for q in qs]  # ceil
    return [ordered[max(0, rank - 1)] for rank in ranks]
