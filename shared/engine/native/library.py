"""Calling the kernels: their structs and entries in ctypes, and which of them a process loads.

Every call releases the GIL for its whole duration, so the event loop beside the compute thread runs
while a step computes. Pointers are plain addresses: whoever passes one keeps its tensor alive.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from shared.cache_folder import cache_folder
from shared.engine.memory import huge_pages
from shared.engine.native import build

_log = structlog.get_logger(__name__)

PANEL = 64
"""Columns of a weight panel (``kPanel``)."""

ENDS_TOO_SOON = -1
"""``kEndsTooSoon``."""


class LinearStruct(Structure):
    """One matrix ``[n, k]`` in panels."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64))


class PackJob(Structure):
    """A matrix to be packed, from memory or from a file; see kernels.cpp. error:
    0, an errno, or ``ENDS_TOO_SOON``."""

    _fields_ = (
        ("matrix", c_void_p), ("file", c_int64), ("position", c_int64), ("rows", c_int64),
        ("k", c_int64), ("panels", c_void_p), ("first", c_int64), ("width", c_int64),
        ("offset", c_int64), ("error", c_int64),
    )  # fmt: skip

    @property
    def problem(self) -> str:
        """What went wrong; '' if nothing."""
        if self.error == ENDS_TOO_SOON:
            return "the file ends too soon"
        return os.strerror(self.error) if self.error else ""


class LayerStruct(Structure):
    """One layer's weights and KV pools."""

    _fields_ = (
        ("input_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", LinearStruct), ("out", LinearStruct), ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("keys", c_void_p), ("values", c_void_p), ("window", c_int64),
    )  # fmt: skip


class ModelStruct(Structure):
    """One model. scale: of attention scores."""

    _fields_ = (
        ("hidden", c_int64), ("mlp", c_int64), ("heads", c_int64), ("kv_heads", c_int64),
        ("head_dim", c_int64), ("vocab", c_int64), ("num_layers", c_int64),
        ("block_size", c_int64), ("num_blocks", c_int64), ("threads", c_int64),
        ("eps", c_double), ("scale", c_double),
        ("embedding", c_void_p), ("norm", c_void_p), ("head", LinearStruct),
        ("layers", POINTER(LayerStruct)),
    )  # fmt: skip


class BatchStruct(Structure):
    """One step's rows; see ``Batch`` in kernels.cpp for the shapes."""

    _fields_ = (
        ("num_rows", c_int64), ("num_tokens", c_int64),
        ("token_ids", c_void_p), ("firsts", c_void_p), ("starts", c_void_p),
        ("tables", c_void_p), ("table_at", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("x", c_void_p), ("scratch", c_void_p),
    )  # fmt: skip


class HeadStruct(Structure):
    """Where logits go: normed: scratch ``[count, hidden]``; float32 logits
    ``[count, vocab]``; best: int64 ``[count]``."""

    _fields_ = (
        ("count", c_int64), ("normed", c_void_p), ("logits", c_void_p), ("best", c_void_p),
    )  # fmt: skip


class Library:
    """The kernels for numbers of one kind, loaded. instructions: see ``build``. origin: of the
    file, for people. shortfall: what could be better about them, '' if nothing. Raises OSError,
    build.NotMade."""

    def __init__(self, path: str, dtype: torch.dtype, instructions: str, origin: str) -> None:
        self.dtype = dtype
        self.instructions = instructions
        self.origin = origin
        self.shortfall = ""
        handle = self._handle = ctypes.CDLL(path)
        if error := handle.pd_prepare():
            raise build.NotMade(f"Linux grants no {instructions} registers: {os.strerror(error)}")
        self.max_head_dim = int(handle.pd_max_head_dim())
        self.max_group = int(handle.pd_max_group())
        for name in (
            "forward",
            "embed",
            "first_half",
            "second_half",
            "logits",
            "deny",
            "pack",
            "linear",
        ):
            getattr(handle, f"pd_{name}").restype = None

    def check(self, model: ModelStruct, batch: BatchStruct) -> bool:
        """Whether every token id, block and length of the batch exists."""
        return self._handle.pd_check(byref(model), byref(batch)) == 0

    def forward(self, model: ModelStruct, batch: BatchStruct) -> None:
        """All layers."""
        self._handle.pd_forward(byref(model), byref(batch))

    def embed(self, model: ModelStruct, batch: BatchStruct) -> None:
        """Fill ``x`` with embeddings; then both halves of each layer, in order."""
        self._handle.pd_embed(byref(model), byref(batch))

    def first_half(self, model: ModelStruct, batch: BatchStruct, layer: int) -> None:
        """Up to and with the layer's KV."""
        self._handle.pd_first_half(byref(model), byref(batch), c_int64(layer))

    def second_half(self, model: ModelStruct, batch: BatchStruct, layer: int) -> None:
        """Attention and feed-forward."""
        self._handle.pd_second_half(byref(model), byref(batch), c_int64(layer))

    def logits(self, model: ModelStruct, hidden: int, head: HeadStruct) -> None:
        """Final norm, head, and the most likely token, of ``[count, hidden]``."""
        self._handle.pd_logits(byref(model), c_void_p(hidden), byref(head))

    def deny(self, model: ModelStruct, head: HeadStruct, allowed: int) -> None:
        """Leave each row of logits the tokens that it may choose, and find the most likely of them.
        allowed: address of addresses ``[count]`` of masks as in ``Masks.bits``, 0 = all."""
        self._handle.pd_deny(byref(model), byref(head), c_void_p(allowed))

    def pack(self, jobs: Sequence[PackJob]) -> Sequence[PackJob]:
        """Put matrices into panels, all threads at once; see ``PackJob``. Returns the jobs with
        their errors."""
        packed = (PackJob * len(jobs))(*jobs)  # copies
        self._handle.pd_pack(packed, c_int64(len(jobs)), c_int64(torch.get_num_threads()))
        return list(packed)

    def product(self, matrix: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Pack one matrix ``[n, k]`` and return ``(x, out) -> x @ matrix.T``, for measurements and
        tests; x: ``[count, k]``. Memory is as a model's (``NativeForward``) where ``out`` is given:
        else the kernel's zeroing of new pages is measured, too."""
        rows, k = matrix.shape
        panels = huge_pages.tensor((-(-rows // PANEL) * PANEL * k,), self.dtype)
        job = PackJob(
            matrix=matrix.data_ptr(), rows=rows, k=k, panels=panels.data_ptr(), width=PANEL
        )
        self.pack([job])
        weights = LinearStruct(panels=panels.data_ptr(), bias=None, n=rows, k=k)

        def product(
            x: torch.Tensor, out: torch.Tensor | None = None, _keep: torch.Tensor = panels
        ) -> torch.Tensor:
            if out is None:
                out = torch.empty(x.shape[0], rows, dtype=self.dtype)
            self._handle.pd_linear(
                byref(weights),
                c_void_p(x.data_ptr()),
                c_int64(x.shape[0]),
                c_void_p(out.data_ptr()),
                c_int64(torch.get_num_threads()),
            )
            return out

        return product


def load(dtype: torch.dtype, instructions: str = "") -> Library:
    """Return the kernels of this process for bfloat16 or float32, compiling them if need be
    (seconds). instructions: '' = the quickest that this CPU has and a compiler makes.

    Raises build.Unavailable, at once from the second time on."""
    found = _found(dtype, instructions)
    if isinstance(found, Library):
        return found
    raise build.Unavailable(found)


class AvailableKernels(NamedTuple):
    """How it stands with these kernels on this machine: what bfloat16 and float32 are computed by
    and where that is from, or why they are not (''), and what could be better ('')."""

    instructions: Mapping[str, str]
    origin: str
    reason: str
    shortfall: str


def available() -> AvailableKernels:
    """Return what the next worker here would find; compiles it if need be."""
    try:
        found = {numbers: load(getattr(torch, numbers)) for numbers in build.NUMBERS}
    except build.Unavailable as error:
        return AvailableKernels({}, "", str(error), "")
    chosen = {numbers: kernels.instructions for numbers, kernels in found.items()}
    origins = dict.fromkeys(kernels.origin for kernels in found.values())
    shortfall = next(iter(found.values())).shortfall
    return AvailableKernels(chosen, ", ".join(origins), "", shortfall)


@cache
def _found(dtype: torch.dtype, instructions: str) -> Library | str:
    numbers = str(dtype).removeprefix("torch.")
    names = [instructions] if instructions else build.usable_instructions(numbers)
    if reason := build.unsupported(names[0] if names else "avx2"):
        return reason
    reasons: list[str] = []
    for name in names:
        try:
            found = _load(dtype, numbers, name)
            _log.info("native kernels loaded", kernels=f"{numbers} by {name}", outcome=found.origin)
            if reasons:
                found.shortfall = f"not by {names[0]}: {reasons[0]}"
                _log.warning("native kernels could be quicker", reason=found.shortfall)
            return found
        except build.NotMade as error:
            reasons.append(str(error))
        except build.Unavailable as error:
            return str(error)
    return reasons[0]


def _load(dtype: torch.dtype, numbers: str, instructions: str) -> Library:
    def opened(path: Path, origin: str = "compiled now") -> Library:
        return Library(str(path), dtype, instructions, origin)

    is_unusable = False
    for path, reason in build.find_compiled(numbers, instructions):
        if not reason:
            is_brought = path.parent == build.HERE
            try:
                return opened(path, "brought with pdmesh" if is_brought else "from the cache")
            except OSError as error:  # made where other libraries are
                is_unusable = True
                reason = str(error)
        _log.warning("compiled kernels passed over", file=str(path), reason=reason)
    folder = cache_folder("native")
    try:
        try:
            return opened(build.compile_into(folder, numbers, instructions, anew=is_unusable))
        except build.NoPlace as error:
            with tempfile.TemporaryDirectory() as scratch:
                found = opened(build.compile_into(Path(scratch), numbers, instructions))
            found.shortfall = f"compiled at every start: {error}"
            _log.warning("native kernels are compiled at every start", reason=str(error))
            return found
    except OSError as error:
        raise build.Unavailable(f"native kernels cannot be loaded: {error}") from error
