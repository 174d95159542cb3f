"""DistServe's placement for a file of requests: lengths drawn from it, arrivals by Poisson."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.planner.core.placement import (
    Affinity,
    LatencyGoal,
    Placed,
    Placement,
    Replicas,
    Success,
    best_rate,
    high_affinity,
    placements,
    quantile,
)
from services.planner.distserve_data import DistServeData
from services.planner.model_kv import kv_shape
from services.sim.baselines.distserve import (
    DECODE_CAP_TOKENS,
    Arrival,
    DistServeSim,
    Instance,
    Latency,
)
from services.sim.baselines.distserve_times import Coefficients, Degree
from shared.errors import InvalidRequest
from shared.telemetry.definitions import Slo

_NO_TIME = Coefficients((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 1)


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests at any rate: the same lengths and the same gaps, stretched (common random
    numbers, so that placements differ by what they are and not by luck)."""

    lengths: Sequence[tuple[int, int]]
    gaps: Sequence[float]

    @staticmethod
    def drawn(lengths: Sequence[tuple[int, int]], num: int, seed: int) -> Demand:
        """Draw ``num`` requests, with replacement."""
        rng = random.Random(seed)
        return Demand(
            [rng.choice(lengths) for _ in range(num)],
            [0.0, *(rng.expovariate(1.0) for _ in range(num - 1))],
        )

    def at(self, rate: float) -> list[Arrival]:
        """Return the requests at so many a second."""
        at_ms, arrivals = 0.0, list[Arrival]()
        for (prompt, output), gap in zip(self.lengths, self.gaps, strict=True):
            at_ms += gap * 1000 / rate
            arrivals.append(Arrival(at_ms, prompt, output))
        return arrivals


class Placer:
    """Asks the simulator what placements of one model attain."""

    def __init__(
        self, data: DistServeData, model: str, demand: Demand, goal: LatencyGoal, success: Success
    ) -> None:
        self._demand = demand
        self._goal: LatencyGoal = goal
        self._success: Success = success
        longest = max(prompt for prompt, _ in demand.lengths)
        self._degrees = {
            degree: instances
            for degree in data.degrees(model)
            if (instances := data.phase(model, degree)).capacity >= longest
        }
        self._shape = kv_shape(model)
        largest = max(prompt + output for prompt, output in demand.lengths)
        if largest > DECODE_CAP_TOKENS:
            raise InvalidRequest(
                f"a request of {largest} tokens is more than the {DECODE_CAP_TOKENS} of one decode "
                "batch: it would wait for ever"
            )

    def candidates(self, num_nodes: int, gpus_per_node: int, affinity: Affinity) -> list[Placement]:
        """Return the placements for which there are coefficients, and room for every prompt."""
        return [
            one
            for one in placements(self._shape, num_nodes, gpus_per_node, affinity)
            if one.whole_prefill in self._degrees and one.whole_decode in self._degrees
        ]

    def alone(self, candidates: Sequence[Placement]) -> Slo:
        """Return the tightest limits that such a share of requests can keep, each by itself."""
        felt = [self._run(*self._both(one), 1e-6) for one in candidates]
        target = self._goal.target
        return Slo(
            min(quantile([one.ttft_ms for one in each], target) for each in felt) / 1000,
            min(quantile([one.tpot_ms for one in each], target) for each in felt) / 1000,
        )

    def together(self, candidates: Sequence[Placement]) -> Iterator[Placed]:
        """Yield what each attains with both phases simulated together (algorithm 2; their code
        does the same for high affinity)."""
        for one in candidates:

            def attains(rate_per_gpu: float, one: Placement = one) -> bool:
                felt = self._run(*self._both(one), rate_per_gpu * one.num_devices)
                return self._goal.is_met(felt, self._success)

            yield Placed(one, best_rate(attains))

    def apart(self, most_gpus: int, rate: float) -> tuple[Replicas, Replicas] | None:
        """Place each phase by itself: no answers for prefill, prompts in no time for decode."""
        free = float("inf")

        def prefill_attains(degree: Degree, at: float) -> bool:
            instances = self._degrees[degree]
            arrivals = [replace(one, output_len=0) for one in self._demand.at(at)]
            latencies = DistServeSim(instances, instances).run(arrivals)
            return replace(self._goal, tpot_ms=free).is_met(latencies, self._success)

        def decode_attains(degree: Degree, at: float) -> bool:
            decode = self._degrees[degree]
            prefill = replace(decode, degree=Degree(1, 1), coefficients=_NO_TIME)
            latencies = self._run(prefill, decode, at)
            return replace(self._goal, ttft_ms=free).is_met(latencies, self._success)

        degrees = [degree for degree in self._degrees if degree.num_devices <= most_gpus]
        return high_affinity(degrees, prefill_attains, decode_attains, rate)

    def _both(self, one: Placement) -> tuple[Instance, Instance]:
        return self._degrees[one.whole_prefill], self._degrees[one.whole_decode]

    def _run(self, prefill: Instance, decode: Instance, rate: float) -> list[Latency]:
        return DistServeSim(prefill, decode).run(self._demand.at(rate))
