"""Which device an engine computes on: found once, when it is made, and with its index.

``cuda`` alone means another device on every thread; everybody but the engine's maker is given what
``resolve_device`` returned.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from shared.errors import EngineFailed

_log = structlog.get_logger(__name__)


def resolve_device(name: str) -> torch.device:
    """Return the device that ``cpu``, ``cuda`` (this thread's), ``cuda:N`` or ``auto`` (cuda where
    torch sees one) stands for.

    Raises EngineFailed: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    asked = torch.device(name)
    if asked.type != "cuda":
        return asked
    if not torch.cuda.is_available():
        raise EngineFailed(
            f"--device {name}: torch sees no CUDA device; `pdmesh doctor` says why",
            code="no_device",
        )
    index = torch.cuda.current_device() if asked.index is None else asked.index
    count = torch.cuda.device_count()
    if index >= count:
        there = ", ".join(f"cuda:{one}" for one in range(count))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        among = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise EngineFailed(f"--device {name}: torch sees {there}{among}", code="no_device")
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    """Return its maker's name for it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # Linux alone has it, and not for every CPU
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device this thread's own while this is held: Triton launches there, page-locked
    memory and the libraries' handles belong to it. Nothing on CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether torch's allocator is told to use segments that grow.

    The variable with CUDA in its name wins (torch/include/c10/cuda/CUDAAllocatorConfig.h).
    """
    settings = environment.get("PYTORCH_CUDA_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", ""))
    # As torch reads it: spaces anywhere mean nothing.
    return "expandable_segments:True" in "".join(settings.split()).split(",")


def require_shareable_memory(environment: Mapping[str, str]) -> None:
    """Raise EngineFailed if another process could not open the memory that torch allocates: UCX
    would move KV through the host, and say nothing."""
    if has_expandable_segments(environment):
        raise EngineFailed(
            "expandable_segments:True and KV from GPU to GPU (cuda_ipc) do not go together: leave "
            "it out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF",
            code="expandable_segments",
        )


def page_lock(memory: np.ndarray, device: torch.device) -> None:
    """See ``Engine.page_lock``. Not by torch's pinned memory, which comes in powers of two.

    Where the driver refuses, it copies through buffers of its own: slower, and said.
    """
    if device.type != "cuda":
        return
    cudart: Any = torch.cuda.cudart()
    with current(device):
        code = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code:
        _log.warning("host memory is not page-locked", num_bytes=memory.nbytes, code=code)
