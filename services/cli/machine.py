"""What each worker of a local mesh may take of this machine: cores and GPUs.

Workers that are started together would each see all of it. Loads neither torch nor CUDA.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part. gpus: for CUDA_VISIBLE_DEVICES, its own one first; '' = as it is.
    num_sharers: workers on its device, itself included."""

    threads: int
    gpus: str
    num_sharers: int


class LocalShape(NamedTuple):
    """How many workers of which kind; why: for people, where it was chosen for them."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    workers: int = 0
    why: str = ""


def shape_for(*, computes: bool, cores: float, num_gpus: int) -> LocalShape:
    """Return the shape of a mesh of which nobody has said anything.

    computes: whether the engine has steps that cores or GPUs can be short of. cores: see
    ``granted_cores``. Apart pays where each role has a device of its own; within one, the half of
    an idle role lies idle (bench/serve, docs/when-disaggregation-helps.md).
    """
    if not computes:
        return LocalShape(prefill=1, decode=1)
    if num_gpus > 1:
        why = f"{num_gpus} GPUs, so as many workers, each prefill or decode as the load has it"
        return LocalShape(workers=num_gpus, why=why)
    device = "the GPU" if num_gpus else f"all {cores:g} cores"
    if not num_gpus and cores < 2:
        device = "the one core" if cores >= 1 else f"{cores:g} of a core, which is all it may take"
    why = f"one worker for prompts and answers, with {device}: apart, each role would have a part"
    return LocalShape(
        colocated=1, why=f"{why} of it, and leave that idle while the other has a queue"
    )


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs that we may use, [] if there is none or no nvidia-smi to ask.

    UUIDs, for nvidia-smi counts along the bus, and CUDA begins with the fastest; but where somebody
    has chosen, the names that they gave, up to the first that names none: CUDA reads no further.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        rows = [line.split(",") for line in answer.stdout.splitlines()]
        uuids = {index.strip(): uuid.strip() for index, uuid in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(uuids.values())

    def is_one(name: str) -> bool:
        return name in uuids or any(name and uuid.startswith(name) for uuid in uuids.values())

    names = (name.strip() for name in visible.split(","))
    return list(takewhile(is_one, names))


def shares(devices: Sequence[str], *, num_cores: int, gpus: Sequence[str]) -> list[Share]:
    """Divide the machine among workers: cores equally, GPUs in turn.

    devices: what each worker was told; only auto and cuda leave a choice.
    """
    orders: list[Sequence[str]] = []
    num_dealt = 0
    for device in devices:
        order: Sequence[str] = ()
        if gpus and device in ("auto", "cuda"):
            own = num_dealt % len(gpus)
            num_dealt += 1
            # All stay visible: without that UCX cannot copy from one GPU to the other.
            order = (*gpus[own:], *gpus[:own])
        orders.append(order)
    places = [order[0] if order else device for order, device in zip(orders, devices, strict=True)]
    threads = max(1, num_cores // len(devices))
    return [
        Share(threads, ",".join(order), places.count(place))
        for order, place in zip(orders, places, strict=True)
    ]
