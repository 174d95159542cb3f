"""What each worker of a local mesh may take of this machine: cores, GPUs and their memory.

Workers that are started together would each see all of it. Loads neither torch nor CUDA.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

GPU_SHARE = 0.8
"""Of the free memory; the rest is for activations and the libraries."""

RUNTIME_GIB = 1.0
"""What CUDA and torch take for themselves in each process."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. id: as CUDA_VISIBLE_DEVICES takes it."""

    id: str
    free_gib: float


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part. gpus: for CUDA_VISIBLE_DEVICES, its own one first; '' = as it is. kv_gib:
    0 = the worker's own default."""

    threads: int
    gpus: str = ""
    kv_gib: float = 0.0


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that we may use, [] if there is none or no nvidia-smi to ask."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
        gpus = {index: Gpu(index, int(free) / 1024) for index, _, free in rows}
        names = {uuid: index for index, uuid, _ in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(gpus.values())
    ids = [name.strip() for name in visible.split(",")]
    return [gpus[names.get(i, i)] for i in ids if names.get(i, i) in gpus]


def shares(
    num_workers: int, *, num_cores: int, gpus: Sequence[Gpu], weights_bytes: int
) -> list[Share]:
    """Divide the machine among workers of one model: cores equally, GPUs in turn.

    Workers that share a GPU get a size for their KV, since each would otherwise take most of what
    is free.
    """
    threads = max(1, num_cores // num_workers)
    if not gpus:
        return [Share(threads)] * num_workers
    parts: list[Share] = []
    for worker in range(num_workers):
        own = worker % len(gpus)
        num_sharers = len(range(own, num_workers, len(gpus)))
        kv_gib = 0.0
        if num_sharers > 1:
            part_gib = GPU_SHARE * gpus[own].free_gib / num_sharers
            kv_gib = max(0.25, part_gib - weights_bytes / GIB - RUNTIME_GIB)
        # All stay visible: without that UCX cannot copy from one GPU to the other.
        order = [*gpus[own:], *gpus[:own]]
        parts.append(Share(threads, ",".join(gpu.id for gpu in order), round(kv_gib, 2)))
    return parts


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def weights_bytes(folder: Path) -> int:
    """Size of the weights in a model folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
