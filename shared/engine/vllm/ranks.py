"""Tensor parallel: ranks are vLLM's processes, and their KV is mapped into the worker's.

    rank process    its KV pools are made shared memory; the file `rank-N.json` says where they are,
                    and a datagram a layer says that it is written
    worker          maps all pools, so that gather and scatter reach them like its own; a layer is
                    written when every rank has written it

The wire has all heads (``pools.py``), so that leases, tags, frames and acknowledgements know no
ranks, and both ends of a transfer may have different numbers of them. Knows no vLLM.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from shared.engine.base import OnLayer
from shared.errors import EngineFailed

LAYER_WITHIN_S = 30.0
"""From a step's results to the last word of the slowest rank; a rank that is killed is found out by
vLLM."""

_EVENT = struct.Struct("<BHI")
"""rank, layer, step."""

_SOCKET = "layers"
_RANK_FILE = "rank-{}.json"
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16),
        *(torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class RankEnd:
    """The end in a rank's process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = str(folder / _SOCKET)

    @classmethod
    def open(cls, folder: str, pools: Sequence[torch.Tensor]) -> RankEnd:
        """Share this rank's pools and say where they are."""
        import torch.multiprocessing as processes
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        processes.set_sharing_strategy("file_system")
        handles: dict[int, Sequence[object]] = {}
        tensors: list[dict[str, object]] = []
        for pool in pools:
            storage = pool.untyped_storage()
            if storage.device.type != "cpu":
                raise EngineFailed("tensor parallel workers share KV of host memory alone")
            handle = handles.get(storage.data_ptr())
            if handle is None:
                storage.share_memory_()
                names = storage._share_filename_cpu_()
                handle = [name.decode() if isinstance(name, bytes) else name for name in names]
                handles[storage.data_ptr()] = handle
            tensors.append(
                {
                    "handle": handle,
                    "shape": list(pool.shape),
                    "stride": list(pool.stride()),
                    "offset": pool.storage_offset(),
                    "dtype": str(pool.dtype),
                }
            )
        place = Path(folder)
        unfinished = place / f".{rank}"
        unfinished.write_text(json.dumps(tensors))
        unfinished.rename(place / _RANK_FILE.format(rank))
        return cls(place, rank)

    def tell(self, step: int, layer: int) -> None:
        """This rank has written a layer's KV of a step."""
        self._socket.sendto(_EVENT.pack(self._rank, layer, step), self._path)


def map_pools(folder: Path, num_ranks: int) -> list[list[torch.Tensor]]:
    """Return every rank's pools, mapped: [rank][layer].

    Raises EngineFailed: a rank has not said where they are, or they cannot be mapped."""
    found: list[list[torch.Tensor]] = []
    for rank in range(num_ranks):
        try:
            described = json.loads((folder / _RANK_FILE.format(rank)).read_text())
            maps: dict[str, torch.UntypedStorage] = {}
            pools: list[torch.Tensor] = []
            for it in described:
                manager, handle, size = it["handle"]
                if handle not in maps:
                    maps[handle] = torch.UntypedStorage._new_shared_filename_cpu(
                        manager.encode(), handle.encode(), size
                    )
                empty = torch.empty(0, dtype=_DTYPES[it["dtype"]])
                pools.append(empty.set_(maps[handle], it["offset"], it["shape"], it["stride"]))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise EngineFailed(f"the KV of rank {rank} cannot be mapped: {error}") from error
        found.append(pools)
    return found


class LayerEvents:
    """Hears the ranks, on a thread of its own, from before they start until ``close``."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = folder / _SOCKET
        self._socket.bind(str(self._path))
        self._lock = threading.Lock()
        self._all_written = threading.Event()
        self._step = 0
        self._num_layers = 0
        self._on_layer: OnLayer | None = None
        self._written = [0] * num_ranks
        self._num_told = 0
        self._thread = threading.Thread(target=self._hear, name="vllm-layers", daemon=True)
        self._thread.start()

    def begin(self, step: int, num_layers: int, on_layer: OnLayer) -> None:
        """Follow a step from now on."""
        with self._lock:
            self._step, self._num_layers, self._on_layer = step, num_layers, on_layer
            self._written = [0] * self._num_ranks
            self._num_told = 0
            self._all_written.clear()

    def wait(self) -> None:
        """Wait until every rank has written every layer of the step that is followed: the results
        come from one rank, which may be ahead of the others.

        Raises EngineFailed: a rank is silent."""
        if not self._all_written.wait(LAYER_WITHIN_S):
            raise EngineFailed("a rank has not written its KV though the step has ended")

    def close(self) -> None:
        """End the thread."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self._path))
        self._thread.join()
        self._socket.close()

    def _hear(self) -> None:
        while data := self._socket.recv(_EVENT.size):
            rank, layer, step = _EVENT.unpack(data)
            with self._lock:
                if step == self._step and self._on_layer is not None:
                    self._take(rank, layer)

    def _take(self, rank: int, layer: int) -> None:
        assert self._on_layer is not None
        self._written[rank] = layer + 1
        for written in range(self._num_told, min(self._written)):
            self._on_layer(written)
        self._num_told = max(self._num_told, min(self._written))
        if self._num_told == self._num_layers:
            self._all_written.set()
