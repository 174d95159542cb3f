"""The simulator's mesh with the fake engine's arithmetic: answers are exact to the last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.gateway.core.routing.sides import Places, RouteRequest, RoutingPolicy, Sides
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.orders import WorkerSize
from shared.engine.fake import FakeEngine, FakeModel
from shared.predict.step_time import NO_FIT, StepFit
from shared.step import RowResult, StepRow

MODEL = FakeModel(vocab_size=64, max_model_len=512, num_layers=2, num_kv_heads=1, head_dim=8)


class ExactEngine(TimedEngine):
    """The fake engine, asked as the simulator asks."""

    spreads_layers = False  # its KV is there when a step is computed

    def fits(self) -> tuple[StepFit, StepFit]:
        """See TimedEngine."""
        return NO_FIT, NO_FIT

    def __init__(self, size: WorkerSize) -> None:
        self._fake = FakeEngine(model=MODEL, num_blocks=size.num_blocks, block_size=size.block_size)

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        """See TimedEngine."""
        return self._fake.step_seconds(rows)

    def step(self, rows: Sequence[StepRow], on_layer: Callable[[int], None]) -> list[RowResult]:
        """See TimedEngine."""
        return self._fake.step(rows, on_layer)

    def read(self, blocks: Sequence[int], start: int, stop: int, layers: tuple[int, int]) -> object:
        """See TimedEngine."""
        num_bytes = (stop - start) * (layers[1] - layers[0]) * MODEL.layout.token_layer_bytes
        payload = np.zeros(num_bytes, np.uint8)
        self._fake.gather(blocks, start, stop, *layers, payload)
        return payload

    def write(
        self, blocks: Sequence[int], start: int, stop: int, layers: tuple[int, int], kv: object
    ) -> None:
        """See TimedEngine."""
        assert isinstance(kv, np.ndarray)
        self._fake.scatter(blocks, start, stop, *layers, kv)


class ThereAndBack(RoutingPolicy):
    """From either of two workers to the other in turn, at first each alone until so many are sent;
    what is tried again goes where it may."""

    name = "there and back"
    moves_roles = True

    def __init__(self, num_alone: int = 0) -> None:
        self.memory = 0
        self._num_alone = num_alone

    def choose(self, request: RouteRequest, sides: Sides, *_: object) -> Places:
        """See RoutingPolicy."""
        if request.avoid:
            return 0, sides.partners_of(0)[0]
        self.memory += 1
        prefill = self.memory % 2
        return prefill, prefill if self.memory <= self._num_alone else 1 - prefill


def core_mesh(
    *,
    policy: str = "least_loaded",
    num_blocks: int = 64,
    token_budget: int = 16,
    max_running: int = 16,
) -> CoreMesh:
    """A mesh of tiny workers, whose frames and windows are tiny, too."""
    size = WorkerSize(
        num_blocks=num_blocks,
        block_size=4,
        token_budget=token_budget,
        num_slots=4,
        frame_bytes=1 << 12,
    )
    return CoreMesh(
        MODEL.spec, MODEL.layout, ExactEngine, size, policy=policy, max_running=max_running
    )


def simulated_mesh(
    num_prefill: int,
    num_decode: int,
    num_mixed: int,
    mesh: CoreMesh,
    prompt_size: WorkerSize | None = None,
) -> CoreMesh:
    """Start so many workers on a mesh, and let them report. Mixed ones are colocated, and where the
    policy borrows workers they serve both roles. prompt_size: of those that compute prompts; None =
    as all."""
    moves = mesh.policy.moves_roles
    for _ in range(num_prefill):
        mesh.start("prefill", size=prompt_size)
    for _ in range(num_decode):
        mesh.start("decode")
    for _ in range(num_mixed):
        mesh.start("decode", serves_both=moves, is_colocated=not moves, size=prompt_size)
    mesh.settle()
    return mesh
