"""Fetch a prefix's KV or compute it anew, and how much of a transfer the computation hides.

Mooncake (FAST'25, section 2): prefill of n tokens costs l * (a n^2 d + b n d^2) operations, with
a = 4 and b = 22. Splitwise (ISCA'24, section 4): layers travel while the next ones compute.
"""

from __future__ import annotations

from typing import Final

from services.planner.core.kv_size import KvShape

ATTENTION_OPS: Final = 4
LINEAR_OPS: Final = 22


def prefill_flops(shape: KvShape, num_tokens: int) -> float:
    """Return the operations that a prompt costs."""
    n, d = num_tokens, shape.hidden
    return shape.num_layers * (ATTENTION_OPS * n * n * d + LINEAR_OPS * n * d * d)


def fetch_pays_from(shape: KvShape, num_tokens: int, flops: float) -> float:
    """Return bytes/s from which fetching so many tokens' KV is quicker than computing them.

    flops: operations a second that prefill really gets; at a device's peak this is an upper bound.
    """
    return shape.token_bytes * num_tokens / (prefill_flops(shape, num_tokens) / flops)


def exposed_s(shape: KvShape, num_tokens: int, *, prefill_s: float, link: float) -> float:
    """Return what of a prompt's transfer is left after its computation.

    Layer-wise: a layer leaves when it is computed and its predecessor has left. What a message
    costs is a worker's to measure (``shared.transfer.plan.choose_mode``).
    """
    layer_s = shape.layer_bytes * num_tokens / link
    num = shape.num_layers
    # The last layer has nothing to hide behind, nor has what the link could not carry until then.
    return max(layer_s, num * layer_s - (num - 1) * prefill_s / num)


def pipeline_makespan(chunks_s: list[float], num_stages: int) -> float:
    """Return when the last chunk leaves the last stage (Mooncake's chunked pipeline parallelism).

    chunks_s: each chunk's time on one device; a stage has an equal share of the layers.
    """
    ends = [0.0] * num_stages
    for chunk_s in chunks_s:
        before = 0.0
        for stage in range(num_stages):
            ends[stage] = before = max(ends[stage], before) + chunk_s / num_stages
    return ends[-1]
