"""Safetensors checkpoints: found, checked against what the model needs, and read tensor by tensor.

``get`` maps files: a matrix that is used as it stands costs no copy and its pages are shared by all
processes that serve the folder. What becomes part of another is read instead: ``read_into``,
``place``. Nothing here can run code: no pickle, no torch.load, and every header is checked before
torch sees a byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import weakref
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from shared.errors import ModelError
from shared.model_folder import ModelFolder

MAX_HEADER_BYTES = 16 << 20
FINGERPRINT_EDGE_BYTES = 1 << 20
FINGERPRINT_PIECE_BYTES = 4 << 10

_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorInfo(NamedTuple):
    """What a header says of one tensor. name: there; dtype: safetensors' name for it; begin, end:
    of its bytes in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The tensors of one model folder; open it, ``require`` what the model needs, then ``get``.

    Files stay mapped as long as tensors that ``get`` returned live: replace a folder, never rewrite
    its files while a worker runs.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self.paths = find_files(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors = {path: self._open(path) for path in self.paths}
        self._versions = {path: _version(os.fstat(it)) for path, it in self._descriptors.items()}
        for path, file in self._descriptors.items():
            for name, info in _read_header(path, file).items():
                if name in self.tensors:
                    raise ModelError(
                        f"tensor {name} is in both {self.tensors[name].path} and {path}"
                    )
                self.tensors[name] = info
        self._check_index()
        self._mapped: dict[Path, Any] = {}

    def _open(self, path: Path) -> int:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        weakref.finalize(self, os.close, file)
        return file

    @property
    def dtype(self) -> str:
        """The dtype of most tensors, in our words."""
        names = [info.dtype for info in self.tensors.values() if info.dtype in _DTYPES]
        if not names:
            raise ModelError(f"{self.folder.path}: no floating-point tensor in the checkpoint")
        return str(_DTYPES[max(sorted(set(names)), key=names.count)]).removeprefix("torch.")

    def require(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """Raise ModelError unless the checkpoint holds exactly these tensors.

        Extra tensors that change nothing are passed over: the rotary tables that old versions of
        transformers stored, and a head that equals the embedding which it is tied to.
        """
        for name, shape in shapes.items():
            info = self.tensors.get(name)
            if info is None:
                raise ModelError(f"{self.folder.path}: tensor {name} is missing")
            if info.shape != shape:
                raise ModelError(
                    f"{info.path}: tensor {name} has shape {list(info.shape)}, "
                    f"config.json asks for {list(shape)}"
                )
            if info.dtype not in _DTYPES:
                raise ModelError(
                    f"{info.path}: tensor {name} has dtype {info.dtype}; "
                    f"supported are {', '.join(_DTYPES)}"
                )
        for name, info in self.tensors.items():
            if name in shapes or name.endswith(".rotary_emb.inv_freq"):
                continue
            if tied and name == "lm_head.weight":
                continue
            raise ModelError(
                f"{info.path}: tensor {name} is not part of this architecture: the weights and "
                "config.json do not belong together, or the model has an unsupported feature"
            )

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype it is stored in: a matrix as a view of the mapped file, a
        vector as a copy, for its mapping would need a page table of its own."""
        info = self.tensors[name]
        if len(info.shape) == 1 and info.dtype in _DTYPES:
            out = torch.empty(info.shape, dtype=_DTYPES[info.dtype])
            self.read_into(out, name)
            return out
        try:
            file = self._mapped.get(info.path)
            if file is None:
                file = safe_open(info.path, framework="pt", device="cpu")
                self.require_same(info.path)
                self._mapped[info.path] = file
            return file.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise self.broken(name, error) from error

    def require_same(self, *paths: Path) -> None:
        """Raise ModelError if what has these names, or any file's, is not what was opened."""
        for path in paths or self.paths:
            if _version(path.stat()) != self._versions[path]:
                raise ModelError(
                    f"{path} was exchanged or written while it was loaded: start again"
                )

    def read_into(self, out: torch.Tensor, name: str) -> None:
        """Fill a tensor of the same shape, from the file if no number has to be converted or moved
        to a device: that costs less than to map the file and copy (bench/startup).

        Raises ModelError: the file cannot be read, or ends too soon.
        """
        is_stored_so = out.dtype == _DTYPES.get(self.tensors[name].dtype)
        if not (is_stored_so and out.device.type == "cpu" and out.is_contiguous()):
            out.copy_(self.get(name))
            return
        room = out.flatten().view(torch.uint8).numpy().data
        file, position = self.place(name)
        done = 0
        while done < len(room):
            try:
                count = os.preadv(file, [room[done:]], position + done)
            except OSError as error:
                raise self.broken(name, error) from error
            if count == 0:
                raise self.broken(name, "the file ends too soon")
            done += count

    def place(self, name: str) -> tuple[int, int]:
        """Return where a tensor lies for who reads it by himself: a descriptor, which is open as
        long as this object lives, and the position of its first byte."""
        info = self.tensors[name]
        return self._descriptors[info.path], info.begin

    def broken(self, name: str, why: object) -> ModelError:
        """Return the error for a tensor that cannot be read."""
        return ModelError(f"{self.tensors[name].path}: tensor {name}: {why}")

    def digest(self, *context: str, vocab_size: int) -> bytes:
        """Return 32 bytes that name these weights, with whatever else decides the function.

        Hashed: the context, each tensor's name, dtype, shape and 4 KiB from its middle, all of what
        has a row for each token (embedding and head), and each file's size and first and last MiB.
        Not every byte: hashing 140 GB would take minutes at each start, and what this must catch is
        two workers that were given different models, not an attack on one's own disk. A fine-tune
        may have changed the rows of a few tokens alone (a GiB of them takes 0.1 s), or the matrices
        of a few layers, but of such a one nearly all numbers; another sharding of the same weights
        gets another digest, which is the safe side.
        """
        total = hashlib.sha256()

        def put(part: bytes) -> None:
            total.update(struct.pack("<Q", len(part)))
            total.update(part)

        for text in context:
            put(text.encode())
        for name in sorted(self.tensors):
            info = self.tensors[name]
            put(json.dumps([name, info.dtype, list(info.shape)]).encode())
            file = self._descriptors[info.path]
            if info.shape[:1] == (vocab_size,):
                rows = xxhash.xxh3_128()
                for at in range(info.begin, info.end, FINGERPRINT_EDGE_BYTES):
                    rows.update(os.pread(file, min(FINGERPRINT_EDGE_BYTES, info.end - at), at))
                put(rows.digest())
                continue
            at = max(info.begin, (info.begin + info.end - FINGERPRINT_PIECE_BYTES) // 2)
            put(os.pread(file, min(FINGERPRINT_PIECE_BYTES, info.end - at), at))
        for file in self._descriptors.values():
            size = os.fstat(file).st_size
            put(struct.pack("<Q", size))
            put(os.pread(file, FINGERPRINT_EDGE_BYTES, 0))
            put(os.pread(file, FINGERPRINT_EDGE_BYTES, max(0, size - FINGERPRINT_EDGE_BYTES)))
        return total.digest()

    def _check_index(self) -> None:
        """The index, where there is one, must say of what the shards have where it is. What they
        lack may be needless, as a head that is tied; if not, ``require`` asks for it."""
        index = _read_index(self.folder) if len(self.paths) > 1 else None
        for name, file_name in (index or {}).items():
            info = self.tensors.get(name)
            if info is not None and info.path.name != file_name:
                raise ModelError(
                    f"{self.folder.path}/{INDEX_FILE}: tensor {name} is not in {file_name}"
                )


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def find_files(folder: ModelFolder) -> list[Path]:
    """Return the files of a folder's weights. Raises ModelError: there are none, or not all."""
    single = folder.file(_SINGLE_FILE)
    if single is not None:
        return [single]
    index = _read_index(folder)
    if index is None:
        if any(folder.path.glob("*.bin")) or any(folder.path.glob("*.pt*")):
            raise ModelError(
                f"{folder.path} holds its weights as pickle files, which can run code and are "
                "never loaded: save the model again with safe_serialization=True"
            )
        raise ModelError(f"{folder.path} holds neither {_SINGLE_FILE} nor {INDEX_FILE}")
    paths: list[Path] = []
    for name in sorted(set(index.values())):
        path = folder.file(name)
        if path is None:
            raise ModelError(f"{folder.path}: {name} is missing, {INDEX_FILE} names it")
        paths.append(path)
    return paths


def _read_index(folder: ModelFolder) -> dict[str, str] | None:
    """Return tensor name -> file name."""
    index = folder.json(INDEX_FILE)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder.path}/{INDEX_FILE}: weight_map must be an object with entries")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise ModelError(
                f"{folder.path}/{INDEX_FILE}: {name} is not in a safetensors file: {file_name!r}"
            )
    return weight_map


def _read_header(path: Path, file: int) -> dict[str, TensorInfo]:
    """Read one file's header: 8 bytes little-endian length, then a JSON object.

    Sizes and places are checked here, for a message that names the tensor and because tensors are
    read by their places; safetensors checks them again in a file that it maps.
    """
    try:
        size = os.fstat(file).st_size
        prefix = os.pread(file, 8, 0)
        if len(prefix) < 8:
            raise ModelError(f"{path} is no safetensors file: it has {size} bytes")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelError(f"{path}: its header of {header_bytes} bytes is too large")
        text = os.pread(file, header_bytes, 8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(text) < header_bytes:
        raise ModelError(f"{path} is truncated: its header is incomplete")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    data_at = 8 + header_bytes
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _read_entry(path, name, entry, data_at, size)
    in_order = sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end))
    for before, name in pairwise(in_order):
        if tensors[name].begin < tensors[before].end:
            raise ModelError(f"{path}: tensors {before} and {name} share bytes")
    return tensors


def _read_entry(path: Path, name: str, entry: object, data_at: int, size: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise ModelError(f"{path}: tensor {name} has a malformed header entry")
    if not all(isinstance(dim, int) and dim >= 0 for dim in shape):
        raise ModelError(f"{path}: tensor {name} has a malformed shape")
    if not 0 <= begin <= end:
        raise ModelError(f"{path}: tensor {name} has malformed offsets")
    if data_at + end > size:
        raise ModelError(
            f"{path} is truncated: tensor {name} ends at byte {end} of {size - data_at} that are "
            "there"
        )
    known = _DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        raise ModelError(f"{path}: tensor {name} has {end - begin} bytes, its shape needs another")
    return TensorInfo(path, name, dtype, tuple(shape), data_at + begin, data_at + end)
