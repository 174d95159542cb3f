"""Paged attention by Triton kernels: a row's KV is read block by block, where it lies.

For CUDA; on a CPU only in Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported),
which is how the tests run the very same kernels. Triton comes with CUDA builds of torch; it is
imported at first use, and ``unsupported`` says why it cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared.engine.batch import PagedRows, StepBatch, flatten_rows
from shared.engine.device import current
from shared.engine.paged_kv import TORCH_DTYPES, PagedKv
from shared.engine.upload import to_device
from shared.kv.layout import KvLayout
from shared.step import StepRow

if TYPE_CHECKING:
    from shared.engine.attention import triton_kernels

PROGRAMS_PER_CORE = 2
"""Programs that a multiprocessor should have at least: below that, rows are split."""

_INTERPRETED_PROGRAMS = 4
"""What counts as a full device in the interpreter: enough to split single rows there, too."""


def unsupported(layout: KvLayout, num_heads: int, *, block_size: int, device: torch.device) -> str:
    """Why the kernels cannot compute this model here; '' if they can.

    Compiles and runs them on a few tokens (seconds, unless triton has them in its cache): whether a
    GPU can take them, its compiler knows best.
    """
    try:
        kernels = _kernels()
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if device.type != "cuda" and not kernels.IS_INTERPRETED:
        return f"triton computes on CUDA, not on {device.type}"
    try:
        _try(layout, num_heads, block_size, device)
    except Exception as error:
        # triton's compiler raises errors of many kinds, some without a text.
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"triton's kernels do not run on this device: {text}"
    return ""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """How one step attends in layers of one window; the tensors are the batch's own.

    tiles: of chunks; None = there are none.
    """

    rows: PagedRows
    num_single: int
    num_splits: int
    tiles: triton_kernels.Tiles | None
    block_size: int
    window: int | None


class TritonAttention:
    """The backend of GPUs. See ``base.AttentionBackend``."""

    has_static_plans = True

    def __init__(
        self,
        layout: KvLayout,
        num_heads: int,
        device: torch.device,
        *,
        num_programs: int | None = None,
    ) -> None:
        """num_programs: how many programs fill the device; None = by its multiprocessors."""
        self._kernels = _kernels()
        self._num_kv_heads = layout.num_kv_heads
        self._tile_queries = self._kernels.tile_shape(
            num_heads // layout.num_kv_heads,
            layout.head_dim,
            TORCH_DTYPES[layout.dtype].itemsize,
            is_single=False,
        ).queries
        self._num_programs = num_programs or _full_device(device)

    def plan(
        self, batch: StepBatch, windows: Iterable[int | None], dtype: torch.dtype
    ) -> dict[int | None, TritonPlan]:
        num_single = batch.num_single
        tiles = self._tiles(batch)
        num_splits = self._num_splits(num_single)
        return {
            window: TritonPlan(batch.paged, num_single, num_splits, tiles, batch.block_size, window)
            for window in dict.fromkeys(windows)
        }

    def store(
        self, kv: PagedKv, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch
    ) -> None:
        self._kernels.store(keys, values, kv.keys[layer], kv.values[layer], batch.slots)

    def attend(
        self,
        kv: PagedKv,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: TritonPlan,
    ) -> torch.Tensor:
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        if plan.num_single:
            self._launch(out, queries, kv, layer, plan, None, plan.num_single, plan.num_splits)
        if plan.tiles is not None:
            self._launch(out, queries, kv, layer, plan, plan.tiles, len(plan.tiles.rows), 1)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        queries: torch.Tensor,
        kv: PagedKv,
        layer: int,
        plan: TritonPlan,
        tiles: triton_kernels.Tiles | None,
        num_tiles: int,
        num_splits: int,
    ) -> None:
        self._kernels.attend(
            out,
            queries,
            kv.keys[layer],
            kv.values[layer],
            plan.rows,
            tiles=tiles,
            num_tiles=num_tiles,
            num_splits=num_splits,
            window=plan.window,
            block_size=plan.block_size,
        )

    def _num_splits(self, num_single: int) -> int:
        """Split small batches until the device is full.

        By the number of rows alone, not by their length: a recorded step does not know that yet.
        A split without keys costs next to nothing.
        """
        num_programs = max(1, num_single * self._num_kv_heads)
        wanted = -(-self._num_programs // num_programs)
        return min(self._kernels.MAX_SPLITS, 1 << (wanted - 1).bit_length())

    def _tiles(self, batch: StepBatch) -> triton_kernels.Tiles | None:
        """Cut chunks into tiles, the last tokens first: they see most, and so take longest."""
        chunks = batch.extents[batch.num_single :]
        if not chunks:
            return None
        counts = [-(-(one.last - one.first) // self._tile_queries) for one in chunks]
        rows = np.repeat(np.arange(batch.num_single, len(batch.extents)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(places, kind="stable")[::-1]
        tiles = np.stack((rows[order], places[order] * self._tile_queries))
        return self._kernels.Tiles(*to_device(tiles, batch.slots.device))


def _try(layout: KvLayout, num_heads: int, block_size: int, device: torch.device) -> None:
    """Run every kind of launch once: store, split and whole single tokens, chunks; layers' ops."""
    from shared.engine.triton_layers import TritonOps

    kv = PagedKv(replace(layout, num_layers=1), 2, block_size, device)
    vocab_size, length = 2, 2 * block_size
    rows = [StepRow((1,), 0, (0,)), StepRow((1,) * (length - 1), 1, (0, 1))]
    shape = (layout.num_kv_heads, layout.head_dim)
    dtype = TORCH_DTYPES[layout.dtype]
    with torch.inference_mode(), current(device):
        for num_programs in (1, 1 << 10):
            attention = TritonAttention(layout, num_heads, device, num_programs=num_programs)
            batch = flatten_rows(
                rows, kv, vocab_size=vocab_size, max_model_len=length, device=device
            )
            keys = torch.ones((batch.num_tokens, *shape), dtype=dtype, device=device)
            queries = keys.repeat_interleave(num_heads // layout.num_kv_heads, 1)
            plan = attention.plan(batch, [None], dtype)[None]
            attention.store(kv, 0, keys, keys, batch)
            attention.attend(kv, 0, queries, keys, keys, plan)
        ops, row = TritonOps(), keys.flatten(1)
        ops.rms_norm(row, row[0], 1e-6)
        ops.rotate(keys, keys[:, :1].contiguous(), keys[:, :1].contiguous())
        ops.gate(row)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _full_device(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return PROGRAMS_PER_CORE * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _kernels() -> Any:
    """Import them at first use: triton may be missing, and takes a while."""
    from shared.engine.attention import triton_kernels

    return triton_kernels
