"""Where DistServe puts prefill and decode (OSDI'24, section 4: algorithms 1 and 2).

High node affinity: KV may cross nodes, each phase is placed by itself. Low: KV moves between equal
layers on one node, so both instances are cut into the same number of segments, one of each a node.
The search is exhaustive; what a placement attains, a function says that is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import numpy

from services.planner.core.kv_size import KvShape
from services.sim.baselines.distserve import Latency
from services.sim.baselines.distserve_times import Degree

Affinity = Literal["high", "low"]
Success = Literal["joint", "each"]

MOST_RATE: Final = 5.0
PRECISION: Final = 0.25
"""Of their search: requests/s a GPU at most, and how near the interval's ends come."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One prefill and one decode instance, each in ``segments`` parts of the given degrees."""

    segments: int
    prefill: Degree
    decode: Degree

    @property
    def num_devices(self) -> int:
        """GPUs of both."""
        return self.segments * (self.prefill.num_devices + self.decode.num_devices)

    @property
    def whole_prefill(self) -> Degree:
        """Degree of the prefill instance over all segments."""
        return Degree(self.prefill.tp, self.prefill.pp * self.segments)

    @property
    def whole_decode(self) -> Degree:
        """Degree of the decode instance over all segments."""
        return Degree(self.decode.tp, self.decode.pp * self.segments)

    def __str__(self) -> str:
        return f"{self.segments} x (P {self.prefill} + D {self.decode})"


def placements(
    model: KvShape, num_nodes: int, gpus_per_node: int, affinity: Affinity
) -> Iterator[Placement]:
    """Yield every placement that the GPUs and the model's shape allow: tp divides the heads, all of
    pp together the layers."""
    total = num_nodes * gpus_per_node
    within = total if affinity == "high" else gpus_per_node
    tps = [tp for tp in _divisors(model.num_heads) if tp <= within]
    pps = [pp for pp in _divisors(model.num_layers) if pp <= within]
    across = (
        [1] if affinity == "high" else [n for n in _divisors(model.num_layers) if n <= num_nodes]
    )
    for segments, tp, pp, tp_decode, pp_decode in product(across, tps, pps, tps, pps):
        found = Placement(segments, Degree(tp, pp), Degree(tp_decode, pp_decode))
        is_within = affinity == "high" or found.num_devices // segments <= gpus_per_node
        is_divided = all(
            model.num_layers % whole.pp == 0 for whole in (found.whole_prefill, found.whole_decode)
        )
        if is_within and is_divided and found.num_devices <= total:
            yield found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """Limits of one request, ms, and how many must keep them."""

    ttft_ms: float
    tpot_ms: float
    target: float = 0.9

    def is_met(self, latencies: Sequence[Latency], success: Success) -> bool:
        """joint: the share that keeps both limits, as in the paper. each: the percentile of either
        is below its limit, as in their code, which is easier."""
        if success == "joint":
            both = sum(
                one.ttft_ms <= self.ttft_ms and one.tpot_ms <= self.tpot_ms for one in latencies
            )
            return both / len(latencies) >= self.target
        return (
            quantile([one.ttft_ms for one in latencies], self.target) < self.ttft_ms
            and quantile([one.tpot_ms for one in latencies], self.target) < self.tpot_ms
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile by linear interpolation, as pandas does. values: at least one."""
    return float(numpy.quantile(values, share))


def best_rate(
    attains: Callable[[float], bool], most: float = MOST_RATE, precision: float = PRECISION
) -> float:
    """Return the highest rate found that attains, by bisection; 0 = none did."""
    low, high = 0.0, most
    while high - low > precision:
        middle = (low + high) / 2
        if attains(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement and the requests/s a GPU that it attains."""

    placement: Placement
    rate_per_gpu: float

    @property
    def rank(self) -> tuple[float, int]:
        """The higher rate a GPU wins, of equals the one with fewer GPUs."""
        return self.rate_per_gpu, -self.placement.num_devices


@dataclass(frozen=True, slots=True)
class Replicas:
    """One phase of algorithm 1: so many instances of a degree, each with requests/s."""

    degree: Degree
    rate: float
    num: int


def high_affinity(
    degrees: Iterable[Degree],
    prefill_attains: Callable[[Degree, float], bool],
    decode_attains: Callable[[Degree, float], bool],
    rate: float,
) -> tuple[Replicas, Replicas] | None:
    """Place each phase by itself for ``rate`` requests/s (algorithm 1); None: nothing attains.

    The functions are told a degree and the requests/s of one instance.
    """
    known = list(degrees)
    found: list[Replicas] = []
    for attains in (prefill_attains, decode_attains):
        best: tuple[float, int, Degree] | None = None
        for degree in known:
            num = degree.num_devices
            per_gpu = best_rate(lambda r, d=degree, n=num, is_met=attains: is_met(d, r * n))
            if per_gpu and (best is None or (per_gpu, -num) > best[:2]):
                best = (per_gpu, -num, degree)
        if best is None:
            return None
        per_gpu, _, degree = best
        one = per_gpu * degree.num_devices
        found.append(Replicas(degree, one, math.ceil(rate / one)))
    return found[0], found[1]
