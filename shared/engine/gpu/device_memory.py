"""How much of a GPU goes to KV: what the worker may take, less all that it needs besides.

    total   | the worker's share                                                    | others' |
            | weights | largest step | recorded steps | staging | CUDA itself | KV  |

The largest step is not guessed but run, over a pool of one block that all rows name: what it takes
depends on the model, the kernels and the sampler (vLLM's ``determine_available_memory`` does so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from shared.config import STEP_TOKENS
from shared.engine.gpu.decode_buckets import bucket_sizes
from shared.errors import EngineFailed
from shared.request import SamplingParams
from shared.step import SampleSpec, StepRow

_log = structlog.get_logger(__name__)

GIB = 1 << 30

RUNTIME_BYTES = 1 << 30
"""What CUDA's context, kernels and libraries take in each process beside torch's allocator; a
rough bound, not measured here."""

GRAPH_BYTES = 16 << 20
"""What the driver takes for a recorded step beside its tensors; a rough bound, not measured
here."""

_CONTEXT = 1024
"""Tokens behind each row but the first of the largest decode step: with them plain torch's
attention gathers as much at once as it ever does (``sdpa.MAX_GROUP_SLOTS``)."""

_NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What a worker may take of its GPU, and what it will do there.

    share: of the GPU's memory, 0..1. step_tokens, max_rows: of the largest step. staging_bytes: of
    buffers that are made later.
    """

    share: float = 0.9
    step_tokens: int = STEP_TOKENS
    max_rows: int = 256
    staging_bytes: int = 0


class DeviceMemory(NamedTuple):
    """Bytes of a GPU. total, free: as the driver tells, whoever has the rest. held: torch's in this
    process. step, graphs, staging: what the largest step, recorded steps and staging will take
    beside that."""

    total: int
    free: int
    held: int
    step: int
    graphs: int
    staging: int


def kv_bytes_of(memory: DeviceMemory, share: float, *, least: int) -> int:
    """Return how many bytes are left for KV, never fewer than ``least``.

    Raises EngineFailed: fewer are left; it says what took them, and the flags to turn.
    """
    # Of its share and of what is really free the smaller one: others may have taken more than
    # theirs.
    own = int(memory.total * share) - memory.held
    besides = memory.step + memory.graphs + memory.staging + RUNTIME_BYTES
    left = min(own, memory.free) - besides
    if left >= least:
        return left
    taken = ", ".join(
        f"{name} {size / GIB:.2f}"
        for name, size in (
            ("weights", memory.held),
            ("the largest step (--token-budget, --max-running)", memory.step),
            ("recorded steps (--max-graph-rows)", memory.graphs),
            ("staging (--staging-mib)", memory.staging),
            ("CUDA itself", RUNTIME_BYTES),
        )
        if size
    )
    raise EngineFailed(
        f"no memory is left for KV: of this GPU's {memory.total / GIB:.2f} GiB this worker may "
        f"have {share:.0%} (--gpu-memory-share), {memory.free / GIB:.2f} are free beside its "
        f"weights, and it needs: {taken}",
        code="out_of_memory",
    )


def largest_steps(
    needs: MemoryNeeds, *, max_model_len: int, block_size: int
) -> tuple[list[StepRow], list[StepRow]]:
    """Return a step of as many prompt tokens, and one of as many single tokens, as there may be.

    Sequences end where the model does, and name block 0 alone. Rows sample in the way that takes
    most: a nucleus for which the whole vocabulary is sorted, and logprobs.
    """
    params = SamplingParams(temperature=1e4, top_p=0.99, logprobs=_NUM_LOGPROBS)
    spec = SampleSpec(params, 0, (), ())
    table = (0,) * -(-max_model_len // block_size)
    prompts: list[StepRow] = []
    left = needs.step_tokens
    while left and len(prompts) < needs.max_rows:
        length = min(left, max_model_len)
        ids = (0,) * length
        start = max_model_len - length
        prompts.append(StepRow(ids, start, table, spec, _NUM_LOGPROBS, ids[:64]))
        left -= length
    num_rows = min(needs.max_rows, needs.step_tokens)
    stops = [max_model_len, *[min(max_model_len, _CONTEXT)] * (num_rows - 1)]
    return prompts, [StepRow((0,), stop - 1, table, spec) for stop in stops]


def measure(
    step: Callable[[Sequence[StepRow]], object],
    needs: MemoryNeeds,
    *,
    max_model_len: int,
    block_size: int,
    graph_rows: int,
    device: torch.device,
) -> DeviceMemory:
    """Run the largest steps and return what they took; weights are loaded, KV is not.

    graph_rows: of the largest recorded step, 0 = none will be.
    """
    prompts, singles = largest_steps(needs, max_model_len=max_model_len, block_size=block_size)
    peak = max(_peak_bytes(step, rows, device) for rows in (prompts, singles))
    graphs = 0
    if graph_rows:
        # Its tensors are in a pool of their own, which other steps cannot use; sampling is not
        # recorded.
        recorded = [row._replace(sample=None) for row in singles[:graph_rows]]
        graphs = _peak_bytes(step, recorded, device) + len(bucket_sizes(graph_rows)) * GRAPH_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # torch takes 20 MiB at a time, and two buffers of 8 MiB fit into them.
    staging = needs.staging_bytes * 5 // 4
    memory = DeviceMemory(total, free, torch.cuda.memory_reserved(device), peak, graphs, staging)
    _log.info("GPU memory measured", **memory._asdict())
    return memory


def _peak_bytes(
    step: Callable[[Sequence[StepRow]], object], rows: Sequence[StepRow], device: torch.device
) -> int:
    """Most that torch took from the driver during a step, beyond what it must keep."""
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(rows)
    return torch.cuda.max_memory_reserved(device) - held
