"""Which mesh to buy: the cheapest that attains, or the one with the best goodput for a budget.

Closed forms rule out what cannot attain; what is left is simulated by rising cost until two meshes
attain, or, for a budget, by falling bound until no bound is above the best that was found. Adding a
worker is taken never to hurt: a mesh that has no more of anything than one that missed is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from services.planner.core.bounds import WorkerBound, mesh_bound
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit

RUNNER_UP_COST: Final = 2.0
"""The runner-up is looked for among meshes that cost at most so many times the winner."""


@dataclass(frozen=True, slots=True)
class Price:
    """Of one device: what is to be as little as possible."""

    of: Mapping[str, float]
    unit: str

    def cost(self, shape: MeshShape) -> float:
        """Return what a mesh costs."""
        return sum(it.num * it.unit.num_devices * self.of[it.unit.device] for it in shape.parts)

    def text(self, cost: float) -> str:
        """Return a cost with its unit: of one device without the plural."""
        return f"{cost:g} {self.unit.removesuffix('s') if cost == 1 else self.unit}"


@dataclass(frozen=True, slots=True)
class MeshOffer:
    """A mesh that may attain. bound: requests/s beyond which it cannot."""

    shape: MeshShape
    cost: float
    bound: float


def candidates(
    bounds: Mapping[Unit, WorkerBound], price: Price, *, most_devices: int, has_mixed: bool = True
) -> list[MeshOffer]:
    """Return every mesh of at most so many devices: prefill workers of one unit with decode workers
    of one unit, and of one unit mixed ones, with prefill workers or with both kinds."""
    shapes = dict.fromkeys(_shapes(list(bounds), most_devices, has_mixed=has_mixed))
    return [MeshOffer(it, price.cost(it), mesh_bound(it, bounds)) for it in shapes]


def _shapes(units: Sequence[Unit], most: int, *, has_mixed: bool) -> Iterator[MeshShape]:
    for first, second in product(units, units):
        for num_first in range(1, most // first.num_devices + 1):
            left = most - num_first * first.num_devices
            for num_second in range(1, left // second.num_devices + 1):
                pair = (MeshPart(num_first, "P", first), MeshPart(num_second, "D", second))
                yield MeshShape.of(*pair)
                if has_mixed and first == second:
                    rest = (left - num_second * second.num_devices) // first.num_devices
                    for num_mixed in range(1, rest + 1):
                        yield MeshShape.of(*pair, MeshPart(num_mixed, "M", first))
    if has_mixed:
        for unit in units:
            for num_prefill in range(most // unit.num_devices):
                for num in range(1, most // unit.num_devices - num_prefill + 1):
                    yield MeshShape.of(MeshPart(num_prefill, "P", unit), MeshPart(num, "M", unit))


@dataclass(slots=True)
class Search:
    """What has been tried so far, in order; whole at any moment, whatever ends it.

    tried: with the rate that each was found to attain, or whether it attains the one asked for.
    """

    tried: list[tuple[MeshOffer, float]] = field(default_factory=list[tuple[MeshOffer, float]])
    chosen: MeshOffer | None = None
    runner_up: MeshOffer | None = None
    num_ruled_out: int = 0

    def goodput_of(self, candidate: MeshOffer) -> float:
        """Return what it was found to attain."""
        return next(rate for one, rate in self.tried if one is candidate)


def cheapest(
    offers: Sequence[MeshOffer],
    rate: float,
    attains: Callable[[MeshShape], bool],
    search: Search,
) -> None:
    """Find the cheapest mesh that attains a rate, and the next one that is not it and more.

    Fills in ``search`` as it goes.
    """
    possible = [one for one in offers if one.bound >= rate]
    search.num_ruled_out = len(offers) - len(possible)
    missed: list[MeshShape] = []
    for one in sorted(
        possible, key=lambda it: (it.cost, it.shape.num_workers, -it.bound, str(it.shape))
    ):
        chosen = search.chosen
        if chosen is not None and one.cost > RUNNER_UP_COST * chosen.cost:
            break
        if chosen is not None and one.shape.holds(chosen.shape):
            continue
        if any(shape.holds(one.shape) for shape in missed):
            search.num_ruled_out += 1
            continue
        is_good = attains(one.shape)
        search.tried.append((one, rate if is_good else 0.0))
        if not is_good:
            missed.append(one.shape)
        elif chosen is None:
            search.chosen = one
        else:
            search.runner_up = one
            break


def best_goodput(
    offers: Sequence[MeshOffer],
    budget: float,
    goodput: Callable[[MeshShape, float], float],
    search: Search,
) -> None:
    """Find the mesh within a budget that attains the highest rate, and the second.

    goodput: of a mesh, or 0 if it is not above the rate given. Fills in ``search`` as it goes.
    """
    # Costs are sums of floats: what costs just the budget is within it.
    within = [one for one in offers if one.cost <= budget * (1 + 1e-9)]
    shapes = {one.shape for one in within}
    widest = [one for one in within if not _has_room(one.shape, shapes)]
    search.num_ruled_out = len(offers) - len(widest)
    for one in sorted(widest, key=lambda it: (-it.bound, it.cost, str(it.shape))):
        best, second = (
            0.0 if it is None else search.goodput_of(it) for it in (search.chosen, search.runner_up)
        )
        if one.bound <= second:
            search.num_ruled_out += 1
            continue
        found = goodput(one.shape, second)
        search.tried.append((one, found))
        if found > best:
            search.runner_up, search.chosen = search.chosen, one
        elif found > second:
            search.runner_up = one


def _has_room(shape: MeshShape, within: Collection[MeshShape]) -> bool:
    """Whether a worker more of one of its kinds is within the budget, too."""
    return any(
        MeshShape.of(*shape.parts, MeshPart(1, part.kind, part.unit)) in within
        for part in shape.parts
    )


def neighbours(shape: MeshShape) -> list[MeshShape]:
    """Return meshes of as many workers, one of which does another kind's work; more, where decode
    workers would be left with nobody who computes prompts for them."""
    found: list[MeshShape] = []
    for part in shape.parts:
        for kind in "PDM":
            other = _moved(shape, part.kind, kind, part.unit)
            if other.num_of("D") and not other.num_of("P"):
                if kind == "M":  # the last prefill worker: all are mixed
                    for it in [it for it in other.parts if it.kind == "D"]:
                        other = _moved(other, "D", "M", it.unit, it.num)
                elif part.kind == "M" and part.num > 1:
                    other = _moved(other, "M", "P", part.unit)
                else:
                    continue
            if other.can_serve and other != shape and other not in found:
                found.append(other)
    return found


def _moved(shape: MeshShape, kind: str, other: str, unit: Unit, num: int = 1) -> MeshShape:
    """Return a mesh with so many workers of one kind doing another's work."""
    return MeshShape.of(*shape.parts, MeshPart(-num, kind, unit), MeshPart(num, other, unit))
