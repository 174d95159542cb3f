"""What torch can do on this machine, as one JSON line: ``python -m shared.engine.probe``.

A program of its own, because torch takes seconds to load and a broken CUDA may end the process
that loads it. Knows no engine and no model.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

import torch

from shared.engine.device import has_expandable_segments
from shared.engine.native.library import available


def probe() -> dict[str, Any]:
    """Return the facts; '' and empty lists stand for what is not there.

    cuda_built: CUDA version that torch was built for. ipc_error: why another process cannot open
    this one's device memory, '' if it can or there is no device. native: see
    ``native.library.AvailableKernels``.
    """
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda_built": torch.version.cuda or "",
        "devices": [],
        "all_peers": True,
        "ipc_error": "",
        "native": available()._asdict(),
        "has_nvml": _can_load("libnvidia-ml.so.1"),
        "expandable_segments": has_expandable_segments(os.environ),
    }
    if not torch.cuda.is_available():
        return facts
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        facts["devices"].append(
            {"name": properties.name, "free_gib": free / 2**30, "total_gib": total / 2**30}
        )
    facts["all_peers"] = all(
        torch.cuda.can_device_access_peer(a, b)
        for a in range(count)
        for b in range(count)
        if a != b
    )
    facts["ipc_error"] = _ipc_error()
    return facts


def _ipc_error() -> str:
    try:
        # What UCX does for its lane cuda_ipc: cudaIpcGetMemHandle on plain device memory.
        for index in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").untyped_storage()._share_cuda_()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps(probe()))
