"""Which models share which GPUs: MuxServe (ICML'24, arXiv 2404.02015).

An LLM unit is a mesh of GPUs with the models on it. Prefills of a unit go one after the other,
decodes run beside each other on shares of the multiprocessors. The estimator says what a unit
serves; the greedy placement tries every cut of the nodes into meshes and puts the big and the
popular models first. Times come from a roofline: their profile is not free to use.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, permutations, product
from typing import Final

GPU_MEMORY: Final = 80e9
GPU_FLOPS: Final = 312e12
GPU_BANDWIDTH: Final = 2.0e12
PREFILL_EFFICIENCY: Final = 0.5
"""Share of the peak that prefill gets."""

MEMORY_SHARE: Final = 0.98
WEIGHTS_SHARE: Final = 0.8
"""Of a mesh's memory for one model's weights: 30B needs two GPUs, 65B four."""
RUNTIME_BYTES: Final = 6e9
"""Kept free for each model of a mesh."""

SM_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SM_OVERLOAD: Final = 0.2
MAX_BATCH: Final = 256
TP_DEGREES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class MuxModel:
    """One model and its demand. params: weights, 2 bytes each; rate: requests/s."""

    name: str
    params: float
    num_layers: int
    num_heads: int
    rate: float
    # ShareGPT's means, as in their code.
    prompt_len: int = 161
    output_len: int = 338
    head_dim: int = 128

    @property
    def weights(self) -> float:
        """Bytes."""
        return 2 * self.params

    @property
    def kv_token(self) -> float:
        """Bytes of one token's KV."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * 2

    @property
    def scale(self) -> int:
        """How big it counts when models are sorted: 1, 2, 4, 8 for 7, 13, 30, 65 billion."""
        return 1 << sum(self.params >= limit for limit in (10e9, 20e9, 50e9))

    @property
    def step_overhead_s(self) -> float:
        """Of scheduling, for each sequence of a decode step."""
        # As their code has it, of 7, of 13 and of more billions.
        return {1: 0.1e-3, 2: 0.08e-3}.get(self.scale, 0.07e-3)

    @property
    def min_tp(self) -> int:
        """GPUs that its weights need."""
        needed = self.weights + RUNTIME_BYTES
        fits = (tp for tp in TP_DEGREES if needed <= tp * GPU_MEMORY * WEIGHTS_SHARE)
        return next(fits, TP_DEGREES[-1] + 1)

    def prefill_s(self, tp: int, batch: int) -> float:
        """Of ``batch`` prompts on all multiprocessors of ``tp`` GPUs."""
        flops = 2 * self.params * self.prompt_len * batch
        return flops / (GPU_FLOPS * PREFILL_EFFICIENCY * tp)

    def decode_s(self, tp: int, sm: float, batch: int) -> float:
        """Of one step; half of the multiprocessors saturate the memory."""
        context = self.prompt_len + self.output_len / 2
        moved = self.weights + batch * context * self.kv_token
        bandwidth = GPU_BANDWIDTH * tp * min(1.0, 2 * sm)
        flops = 2 * self.params * batch / (GPU_FLOPS * tp * sm)
        return max(moved / bandwidth, flops) + self.step_overhead_s * batch


def is_satisfied(throughput: float, rate: float) -> bool:
    """Whether a rate counts as served: half a request or 10 % below is near enough."""
    return throughput + min(0.5, 0.1 * throughput) > rate


def alone(model: MuxModel, tp: int, sm: float, batch: int) -> float:
    """Return requests/s of a model that has a mesh for itself."""
    return batch / (model.prefill_s(tp, batch) + model.decode_s(tp, sm, batch) * model.output_len)


@lru_cache(maxsize=4096)
def sm_share(model: MuxModel, tp: int) -> float:
    """Return the least share of multiprocessors that serves a model's rate at this degree of
    parallelism, or the best there is (its parallel candidate, algorithm 2)."""
    most = _most_sequences([model], tp)[0]
    served: dict[float, float] = {}
    for sm in SM_SHARES:
        served[sm] = alone(model, tp, sm, _least_batch(model, tp, sm, most))
        if served[sm] >= model.rate:
            return sm
    return max(served, key=served.__getitem__)


def _most_sequences(models: Sequence[MuxModel], tp: int) -> list[int]:
    """Return how many sequences each may hold: the cache is shared by rate x bytes of a token."""
    cache = GPU_MEMORY * tp * MEMORY_SHARE - sum(m.weights + RUNTIME_BYTES for m in models)
    total = sum(model.rate * model.kv_token for model in models)
    found: list[int] = []
    for model in models:
        share = max(0.0, cache) * model.rate * model.kv_token / total
        one = model.kv_token * (model.prompt_len + model.output_len)
        found.append(max(1, min(MAX_BATCH, int(share / one))))
    return found


def _least_batch(model: MuxModel, tp: int, sm: float, most: int) -> int:
    return 1 + bisect_left(
        range(1, most), True, key=lambda batch: alone(model, tp, sm, batch) >= model.rate
    )


@lru_cache(maxsize=65536)
def throughput(models: tuple[MuxModel, ...], tp: int) -> float:
    """Return the requests/s that a unit serves: F(b, W), equation 3.

    Batches begin where each model would serve its rate alone, and the one that lags most is raised
    until all are served or the cache is shared out; the best rate-weighted mean on the way counts.
    """
    if not models:
        return 0.0
    shares = [sm_share(model, tp) for model in models]
    most = _most_sequences(models, tp)
    pairs = zip(models, shares, most, strict=True)
    batches = [_least_batch(model, tp, sm, limit) for model, sm, limit in pairs]

    def served() -> list[float]:
        prefill_s = sum(m.prefill_s(tp, b) for m, b in zip(models, batches, strict=True))
        return [
            min(b / (prefill_s + m.decode_s(tp, sm, b) * m.output_len), m.rate)
            for m, sm, b in zip(models, shares, batches, strict=True)
        ]

    def weighted(rates: Sequence[float]) -> float:
        return sum(m.rate * rate for m, rate in zip(models, rates, strict=True))

    best = served()
    while True:
        now = served()
        if weighted(now) > weighted(best):
            best = now
        lagging = [
            idx
            for idx, (model, rate) in enumerate(zip(models, now, strict=True))
            if not is_satisfied(rate, model.rate) and batches[idx] < most[idx]
        ]
        if not lagging:
            return sum(best)
        batches[min(lagging, key=lambda idx: now[idx] / models[idx].rate)] += 1


@dataclass(frozen=True, slots=True)
class ModelMesh:
    """GPUs of one node and the models on them."""

    num_gpus: int
    models: tuple[MuxModel, ...] = ()

    @property
    def throughput(self) -> float:
        """Of the unit."""
        return throughput(self.models, self.num_gpus)

    def with_model(self, model: MuxModel) -> ModelMesh:
        """Return it with one model more."""
        return ModelMesh(self.num_gpus, (*self.models, model))

    def can_hold(self, model: MuxModel) -> bool:
        """Whether memory and multiprocessors are left (a fifth of overload is allowed)."""
        models = (*self.models, model)
        if model.min_tp > self.num_gpus:
            return False
        needed = sum(one.weights + RUNTIME_BYTES for one in models)
        if needed >= GPU_MEMORY * self.num_gpus * MEMORY_SHARE:
            return False
        used = sum(sm_share(one, self.num_gpus) for one in models)
        return used <= 1 + SM_OVERLOAD + 1e-9


def mesh_groups(num_nodes: int, gpus_per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut nodes into meshes of 1, 2, 4 or 8 GPUs, largest first."""
    cuts = list(_cuts(gpus_per_node, gpus_per_node))
    for nodes in combinations_with_replacement(cuts, num_nodes):
        yield tuple(sorted((size for cut in nodes for size in cut), reverse=True))


def _cuts(left: int, largest: int) -> Iterator[tuple[int, ...]]:
    if not left:
        yield ()
    for size in TP_DEGREES[::-1]:
        if size <= min(left, largest):
            for rest in _cuts(left - size, size):
                yield (size, *rest)


def total(meshes: Sequence[ModelMesh]) -> float:
    """Return the requests/s of all meshes."""
    return math.fsum(mesh.throughput for mesh in meshes)


def greedy(
    models: Sequence[MuxModel], num_nodes: int, gpus_per_node: int, *, exchanges: bool = False
) -> list[ModelMesh]:
    """Place models (algorithm 1); [] = they do not fit.

    exchanges: improve every group's placement by `improved`, which is ours.

    Meshes are known by their place in the group and nothing is sorted anew: the published code
    looks gains up by position in a list that it has re-sorted.
    """
    best: list[ModelMesh] = []
    needed = max(model.min_tp for model in models)
    order = sorted(models, key=lambda model: -model.rate * model.scale)
    for group in mesh_groups(num_nodes, gpus_per_node):
        # Their pruning: the largest mesh stands first, and no mesh may stay empty.
        if group[0] < needed or len(group) > len(models):
            continue
        meshes = [ModelMesh(size) for size in group]
        for model in order:
            gains = [
                # Of equal gains the smaller mesh, as theirs; of equal meshes the first.
                (mesh.with_model(model).throughput - mesh.throughput, -mesh.num_gpus, -idx)
                for idx, mesh in enumerate(meshes)
                if mesh.can_hold(model)
            ]
            if not gains:
                break
            idx = -max(gains)[2]
            meshes[idx] = meshes[idx].with_model(model)
        else:
            meshes = improved(meshes) if exchanges else meshes
            if not best or total(meshes) > total(best):
                best = meshes
    return best


def improved(meshes: Sequence[ModelMesh]) -> list[ModelMesh]:
    """Move one model, or swap two, between meshes while that serves more.

    Ours: the published greedy placement alone falls short of the best by up to a fifth.
    """
    best = list(meshes)
    # By more than rounding, or two placements could follow each other for ever.
    while better := next((it for it in _exchanged(best) if total(it) > total(best) + 1e-9), None):
        best = better
    return best


def _exchanged(meshes: Sequence[ModelMesh]) -> Iterator[list[ModelMesh]]:
    """Yield what becomes of meshes when a model moves, or takes the place of another."""
    for a, b in permutations(range(len(meshes)), 2):
        for one, other in product(meshes[a].models, (None, *meshes[b].models)):
            left = [model for model in meshes[a].models if model is not one]
            right = [model for model in meshes[b].models if model is not other]
            first = _filled(meshes[a].num_gpus, left if other is None else [*left, other])
            second = _filled(meshes[b].num_gpus, [*right, one])
            if first is not None and second is not None:
                changed = list(meshes)
                changed[a], changed[b] = first, second
                yield changed


def _filled(num_gpus: int, models: Sequence[MuxModel]) -> ModelMesh | None:
    mesh = ModelMesh(num_gpus)
    for model in models:
        if not mesh.can_hold(model):
            return None
        mesh = mesh.with_model(model)
    return mesh


def brute_force(
    models: Sequence[MuxModel], num_nodes: int, gpus_per_node: int, *, shares: bool = True
) -> list[ModelMesh]:
    """Return the best of all placements, for a few models and GPUs; [] = they do not fit. shares:
    whether models may have a mesh together."""
    best: list[ModelMesh] = []
    for group in mesh_groups(num_nodes, gpus_per_node):
        for places in product(range(len(group)), repeat=len(models)):
            if not shares and len(set(places)) < len(places):
                continue
            meshes: list[ModelMesh] = []
            for idx, size in enumerate(group):
                own = [it for it, place in zip(models, places, strict=True) if place == idx]
                if (mesh := _filled(size, own)) is None:
                    break
                meshes.append(mesh)
            else:
                if not best or total(meshes) > total(best):
                    best = meshes
    return best
