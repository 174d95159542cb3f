"""How many machines of which kind: Splitwise's provisioning (ISCA'24, section 4.4, table VI).

Nine limits, each a slowdown against the same request alone on a DGX-A100; all must hold. Costs and
power are relative to that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from services.planner.core.placement import quantile
from services.sim.baselines.splitwise import SplitwiseRequest
from services.sim.baselines.splitwise_times import MachineTimes

LIMITS: Final = {
    "TTFT": (2.0, 3.0, 6.0),
    "TBT": (1.25, 1.5, 5.0),
    "E2E": (1.25, 1.5, 5.0),
}
PERCENTILES: Final = (0.50, 0.90, 0.99)


@dataclass(frozen=True, slots=True)
class MachineType:
    """cost, power: relative to DGX-A100 (paper, table V). hardware: its name in the data."""

    hardware: str
    cost: float
    power: float


A100: Final = MachineType("a100-80gb", 1.0, 1.0)
H100: Final = MachineType("h100-80gb", 2.35, 1.75)
H100_CAPPED: Final = MachineType("h100-80gb-pcap", 2.35, 1.23)

DESIGNS: Final = {
    "AA": (A100, A100),
    "HH": (H100, H100),
    "HA": (H100, A100),
    "HHcap": (H100, H100_CAPPED),
}


def iso_power(machines: int, of: MachineType, other: MachineType) -> float:
    """Return how many of another type use the same power."""
    return machines * of.power / other.power


def slowdowns(served: Sequence[SplitwiseRequest], alone: MachineTimes) -> dict[str, list[float]]:
    """Return every request's slowdown of the three latencies against the same one alone."""
    found: dict[str, list[float]] = {name: [] for name in LIMITS}
    step_s = alone.token_s(1)
    for one in served:
        first_s = alone.prompt_s(one.prompt_len)
        found["TTFT"].append((one.first_at - one.at) / first_s)
        found["E2E"].append((one.end_at - one.at) / (first_s + one.num_decodes * step_s))
        if one.num_decodes:
            found["TBT"].append((one.end_at - one.first_at) / (one.num_decodes * step_s))
    return found


def broken_limits(served: Sequence[SplitwiseRequest], alone: MachineTimes) -> list[str]:
    """Return which of the nine limits do not hold, worst first; []: the cluster is fine."""
    over: list[tuple[float, str]] = []
    for name, values in slowdowns(served, alone).items():
        for share, limit in zip(PERCENTILES, LIMITS[name], strict=True):
            seen = quantile(values, share) if values else 0.0
            if seen > limit:
                over.append(
                    (seen / limit, f"{name} P{share * 100:.0f}: {seen:.2f}x, limit {limit:g}x")
                )
    return [text for _, text in sorted(over, reverse=True)]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """A cluster that keeps all limits."""

    num_prompt: int
    num_token: int
    cost: float
    power: float

    @classmethod
    def of(
        cls, design: tuple[MachineType, MachineType], num_prompt: int, num_token: int
    ) -> Provisioned:
        """Return so many machines, with what they cost and use."""
        prompt, token = design
        return cls(
            num_prompt,
            num_token,
            num_prompt * prompt.cost + num_token * token.cost,
            num_prompt * prompt.power + num_token * token.power,
        )


def within(
    design: tuple[MachineType, MachineType],
    budget: float,
    goal: Literal["cost", "power"],
    most_prompt: int,
    most_token: int,
) -> list[Provisioned]:
    """Return the clusters of a budget: for each number of token machines as many prompt machines as
    it has left."""
    prompt, token = (getattr(kind, goal) for kind in design)
    nums = [
        (min(most_prompt, int((budget - num_token * token) / prompt + 1e-9)), num_token)
        for num_token in range(1, most_token + 1)
    ]
    return [Provisioned.of(design, *num) for num in nums if num[0] >= 1]


def provision(
    design: tuple[MachineType, MachineType],
    most_prompt: int,
    most_token: int,
    is_fine: Callable[[int, int], bool],
) -> Iterator[Provisioned]:
    """Yield the clusters on the frontier: those from which no machine can be taken.

    is_fine must not turn false when machines are added; then this asks P + T times, not P x T.
    """
    num_prompt, is_found = most_prompt, False
    # Then no smaller one is, either.
    if not is_fine(most_prompt, most_token):
        return
    for num_token in range(1, most_token + 1):
        if not is_fine(num_prompt, num_token):
            continue
        before = num_prompt
        while num_prompt > 1 and is_fine(num_prompt - 1, num_token):
            num_prompt -= 1
        if is_found and num_prompt == before:
            continue  # a token machine more, and not one prompt machine less
        is_found = True
        yield Provisioned.of(design, num_prompt, num_token)
        if num_prompt == 1:
            return
