"""Tensor parallel: ranks are vLLM's processes, and their KV is mapped into the worker's.

    rank process    its KV pools are made shared memory; the file `rank-N.json` says where they are,
                    and a word a layer says that it is written
    worker          maps all pools, so that gather and scatter reach them like its own; a layer is
                    written when every rank has written it

The wire has all heads (``pools.py``), so that leases, tags, frames and acknowledgements know no
ranks, and both ends of a transfer may have different numbers of them. Knows no vLLM.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch

from shared.engine.base import OnLayer
from shared.engine.failures import words_of
from shared.errors import EngineFailed

LAYER_WITHIN_S = 30.0
"""From a step's results to the last word of the slowest rank; a rank that is killed is found out by
vLLM."""

_EVENT = struct.Struct("<BHQ")
"""rank, layer, step."""

_SOCKET = "layers"
_FAILED = "failed-{}"
_RANK_FILE = "rank-{}.json"


@cache
def to_worker(folder: str) -> socket.socket:
    """Return a rank's connection to its worker. From now on this process does not outlive it:
    vLLM's ranks wait for each other where one of them is gone, without end or for minutes."""
    worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        worker.connect(str(Path(folder) / _SOCKET))
    except OSError:
        _end_with_worker()
    threading.Thread(target=_follow, args=(worker,), name="pdmesh-worker", daemon=True).start()
    return worker


def _follow(worker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while worker.recv(1):
            pass
    _end_with_worker()


def _end_with_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class RankEnd:
    """The end in a rank's process, once its KV is there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._socket = to_worker(str(folder))

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
                    "dtype": str(pool.dtype).removeprefix("torch."),
                }
            )
        place = Path(folder)
        unfinished = place / f".{rank}"
        unfinished.write_text(json.dumps(tensors))
        unfinished.rename(place / _RANK_FILE.format(rank))
        return cls(place, rank)

    def tell(self, step: int, layer: int) -> None:
        """This rank has written a layer's KV of a step."""
        self._socket.send(_EVENT.pack(self._rank, layer, step))


class RankErrors(logging.StreamHandler[TextIO]):
    """Takes vLLM's errors in a rank's process: the first one is left where the ranks meet, for the
    worker to say in its own line. Once all have met, errors go to standard error.

    A rank's log is configured before it loads anything, so this is also where it begins to follow
    its worker: one that ends amid a start leaves no rank that loads on, or waits for another."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        to_worker(folder)
        self._place = Path(folder) / _FAILED.format(os.getpid())

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else words_of(error)
        try:
            with self._place.open("x") as file:
                file.write(text)
        except FileExistsError:
            pass
        except OSError:
            super().emit(record)


def write_logging(folder: Path, level: str = "ERROR", own_file: str | None = None) -> str:
    """Write down how ranks log, for ``logging.config.dictConfig``, and return the file. own_file:
    as this one says, and ours beside it."""
    errors = {"()": f"{__name__}.RankErrors", "folder": str(folder), "level": "ERROR"}
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        level = "DEBUG"
    config: dict[str, Any] = {"version": 1, "disable_existing_loggers": False}
    logger: dict[str, Any] = {"level": level, "propagate": False}
    if own_file:
        config = json.loads(Path(own_file).read_text())
        logger = config.get("loggers", {}).get("vllm", {})
    elif level != "ERROR":
        config["handlers"] = {"all": {"class": "logging.StreamHandler"}}
        logger["handlers"] = ["all"]
    logger["handlers"] = ["errors", *logger.get("handlers", ())]
    config.setdefault("handlers", {})["errors"] = errors
    config.setdefault("loggers", {})["vllm"] = logger
    file = folder / "logging.json"
    file.write_text(json.dumps(config))
    return str(file)


def why_failed(folder: Path) -> str:
    """Return the first error of the rank that failed first; '' = none has said one."""
    found = sorted(folder.glob(_FAILED.format("*")), key=lambda file: file.stat().st_mtime_ns)
    return found[0].read_text() if found else ""


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
                empty = torch.empty(0, dtype=getattr(torch, it["dtype"]))
                pools.append(empty.set_(maps[handle], it["offset"], it["shape"], it["stride"]))
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineFailed(f"the KV of rank {rank} cannot be mapped: {error}") from error
        found.append(pools)
    return found


class LayerEvents:
    """Hears the ranks, on a thread of its own, from before they start until ``close``."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Of packets, not of bytes: one read is one event.
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(folder / _SOCKET))
        self._door.listen(num_ranks)
        self._stop, self._stopped = socket.socketpair()
        self._lock = threading.Lock()
        self._all_written = threading.Event()
        self._has_lost = False
        self._on_lost: Callable[[], None] | None = None
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

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call this, on the hearing thread, when a rank ends, and at once if one has ended already;
        None: they are about to."""
        self._on_lost = on_lost
        if self._has_lost and on_lost is not None:
            on_lost()

    def close(self) -> None:
        """End the thread; ranks that are left end, too."""
        self._stop.close()
        self._thread.join()

    def _hear(self) -> None:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
            for one in (self._door, self._stopped):
                stack.callback(one.close)
                ready.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self._door:
                        rank, _ = self._door.accept()
                        stack.callback(rank.close)
                        ready.register(rank, selectors.EVENT_READ)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        if not self._receive(key.fileobj):
                            ready.unregister(key.fileobj)
                            self._has_lost = True
                            if self._on_lost is not None:
                                self._on_lost()

    def _receive(self, rank: socket.socket) -> bool:
        """Take one word of a rank; False: it has ended."""
        try:
            data = rank.recv(_EVENT.size)
        except OSError:
            data = b""
        if not data:
            return False
        with self._lock:
            number, layer, step = _EVENT.unpack(data)
            if step == self._step and self._on_layer is not None:
                self._take(number, layer)
        return True

    def _take(self, rank: int, layer: int) -> None:
        assert self._on_layer is not None
        self._written[rank] = layer + 1
        for written in range(self._num_told, min(self._written)):
            self._on_layer(written)
        self._num_told = max(self._num_told, min(self._written))
        if self._num_told == self._num_layers:
            self._all_written.set()
