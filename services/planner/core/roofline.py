"""How long a step would take on a device that is not at hand: the larger of what its operations and
its bytes take, from a model's shape and a data sheet.

    time = max(operations / peak, bytes / bandwidth) + all-reduces of tensor parallelism
           + activations from stage to stage + a launch

Operations are two for each weight and token and four for each attended position and element of the
heads; bytes are the weights, once a step, and the context that decode rows read. Shares of data
sheets' peaks that real kernels reach are assumptions, stated below.

With pipeline stages it is the way through all of them, as in DistServe's simulator: each has its
part of the layers, prompts go from one to the next in one batch, and rows in as many batches as
there are stages, one in each (so every stage reads its weights once for each of them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from services.planner.core.kv_size import KvShape
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """What a data sheet says of one device.

    flops: dense 16-bit operations a second. memory, bandwidth: bytes, bytes/s. link: bytes/s to its
    neighbours, one way. watts: its power limit. sheet: whose.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    link: float
    watts: float
    sheet: str


DEVICES: Final = {
    name: DeviceSheet(
        name=name,
        flops=tera * 1e12,
        memory=gb * 1e9,
        bandwidth=gb_s * 1e9,
        link=link_gb_s * 1e9,
        watts=watts,
        sheet=f"NVIDIA {sheet} data sheet",
    )
    for name, tera, gb, gb_s, link_gb_s, watts, sheet in (
        ("a100", 312, 80, 2039, 300, 400, "A100 80GB SXM"),
        ("a800", 312, 80, 2039, 200, 400, "A800 80GB SXM"),
        ("h100", 989, 80, 3350, 450, 700, "H100 SXM"),
        ("h800", 989, 80, 3350, 200, 700, "H800 SXM"),
        ("h200", 989, 141, 4800, 450, 700, "H200 SXM"),
        ("h20", 148, 96, 4000, 450, 400, "H20"),
        ("b200", 2250, 180, 7700, 900, 1000, "HGX B200"),
        ("l40s", 362, 48, 864, 32, 350, "L40S"),
        ("l4", 121, 24, 300, 32, 72, "L4"),
    )
}
"""By name. Operations without sparsity; links are NVLink's one direction, of L40S and L4 PCIe's."""


COMPUTE_SHARE: Final = 0.6
BANDWIDTH_SHARE: Final = 0.8
"""Of the peaks, what real kernels get."""
MEMORY_SHARE: Final = 0.9
"""Of the memory, for weights and KV together."""
LAUNCH_S: Final = 0.002
"""Of a step."""
REDUCE_S: Final = 8e-6
"""Latency of one all-reduce, or of the way to the next stage. All five are assumptions, not
measurements: `pdmesh profile -o` is better wherever there is a device."""


@dataclass(frozen=True, slots=True)
class RooflineTimes:
    """A model on ``tp`` devices of one kind that share every layer, in each of ``pp`` stages of
    layers; weights are as wide as KV."""

    model: KvShape
    device: DeviceSheet
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Raise InvalidRequest: the model's weights are not known."""
        if not self.model.num_weights:
            raise InvalidRequest(
                f"how many weights {self.model.name} has does not show in its config.json "
                "(experts, or a family of its own): give times by --profile or --base and the like"
            )

    @property
    def source(self) -> str:
        """See TimeModel."""
        return (
            f"roofline of {self.model.name} on {self._devices} ({self.device.sheet};"
            f" {COMPUTE_SHARE:.0%} of the operations, {BANDWIDTH_SHARE:.0%} of the bandwidth)"
        )

    @property
    def _devices(self) -> str:
        stages = f" in each of {self.pp} stages" if self.pp > 1 else ""
        return f"{self.tp} x {self.device.name}{stages}"

    @property
    def _largest(self) -> float:
        """Part of the layers in the stage that has most of them."""
        return math.ceil(self.model.num_layers / self.pp) / self.model.num_layers

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit beside the weights, in every stage; 0 = not even these fit."""
        memory = self.device.memory * self.tp * MEMORY_SHARE / self._largest
        free = memory - self.model.num_weights * self.model.bytes_per_element
        return max(0, int(free // self.model.token_bytes))

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel."""
        model, device = self.model, self.device
        if num_rows > 1:  # those in one stage
            in_stage = math.ceil(num_rows / self.pp)
            num_rows, num_context = in_stage, round(num_context * in_stage / num_rows)
        num_tokens = num_prompt + num_rows
        operations = 2 * model.num_weights * num_tokens
        elements = model.num_heads * model.head_dim * model.num_layers
        operations += 4 * elements * (num_attended + num_context)
        num_bytes = model.num_weights * model.bytes_per_element + model.token_bytes * num_context
        compute_s = operations / (device.flops * COMPUTE_SHARE * self.tp)
        memory_s = num_bytes / (device.bandwidth * BANDWIDTH_SHARE * self.tp)
        stages_s = max(compute_s, memory_s) * self._largest * self.pp
        return stages_s + self._send_s(num_tokens) + self._reduce_s(num_tokens) + LAUNCH_S

    def _send_s(self, num_tokens: int) -> float:
        """Activations from each stage to the next, divided among its devices."""
        num_bytes = num_tokens * self.model.hidden * self.model.bytes_per_element
        return (self.pp - 1) * (num_bytes / self.tp / self.device.link + REDUCE_S)

    def _reduce_s(self, num_tokens: int) -> float:
        """Two all-reduces a layer, by a ring."""
        if self.tp == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden * self.model.bytes_per_element
        ring_s = 2 * (self.tp - 1) / self.tp * num_bytes / self.device.link
        return 2 * self.model.num_layers * (ring_s + REDUCE_S)

    def warnings(self) -> list[str]:
        """See TimeModel."""
        return ["times are a roofline's, not measured: pdmesh profile -o measures a device"]
