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

from shared.engine.batch import SPLIT_KEYS, PagedRows, StepBatch, flatten_rows
from shared.engine.device import current
from shared.engine.gpu.upload import to_device
from shared.engine.memory.paged_kv import TORCH_DTYPES, PagedKv
from shared.kv.layout import KvLayout
from shared.step import StepRow

if TYPE_CHECKING:
    from shared.engine.attention import triton_kernels


def unsupported(
    layout: KvLayout,
    num_heads: int,
    *,
    block_size: int,
    device: torch.device,
    is_exact: bool = False,
) -> str:
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
        _try(layout, num_heads, block_size, device, is_exact=is_exact)
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
    tiles: triton_kernels.Tiles | None
    block_size: int
    window: int | None


class TritonAttention:
    """The backend of GPUs. See ``base.AttentionBackend``."""

    has_static_plans = True

    def __init__(self, layout: KvLayout, num_heads: int, *, is_exact: bool = False) -> None:
        """is_exact: see ``triton_kernels``; slower."""
        self._kernels = _kernels()
        self._is_exact = is_exact
        self._tile_queries = self._kernels.tile_shape(
            num_heads // layout.num_kv_heads,
            layout.head_dim,
            TORCH_DTYPES[layout.dtype].itemsize,
            is_single=False,
        ).queries

    def plan(
        self, batch: StepBatch, windows: Iterable[int | None], dtype: torch.dtype
    ) -> dict[int | None, TritonPlan]:
        tiles = self._tiles(batch)
        return {
            window: TritonPlan(batch.paged, batch.num_single, tiles, batch.block_size, window)
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
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if plan.num_single:
            self._launch(out, queries, kv, layer, plan, None)
        if plan.tiles is not None:
            self._launch(out, queries, kv, layer, plan, plan.tiles)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        queries: torch.Tensor,
        kv: PagedKv,
        layer: int,
        plan: TritonPlan,
        tiles: triton_kernels.Tiles | None,
    ) -> None:
        self._kernels.attend(
            out,
            queries,
            kv.keys[layer],
            kv.values[layer],
            plan.rows,
            tiles=tiles,
            num_single=plan.num_single,
            window=plan.window,
            block_size=plan.block_size,
            is_exact=self._is_exact,
        )

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


def _try(
    layout: KvLayout, num_heads: int, block_size: int, device: torch.device, *, is_exact: bool
) -> None:
    """Run every kind of launch once: store, split and whole single tokens, chunks; layers' ops."""
    from shared.engine.gpu.triton_layers import ops_for

    num_blocks = -(-(SPLIT_KEYS + 1) // block_size)
    kv = PagedKv(replace(layout, num_layers=1), num_blocks, block_size, device)
    table = range(num_blocks)
    short, long = StepRow((1,), 0, table), StepRow((1,), SPLIT_KEYS, table)
    chunk = StepRow((1,) * 4, 1, table)
    shape = (layout.num_kv_heads, layout.head_dim)
    dtype = TORCH_DTYPES[layout.dtype]
    attention = TritonAttention(layout, num_heads, is_exact=is_exact)
    with torch.inference_mode(), current(device):
        for rows in ((short, chunk), (short, long)):
            batch = flatten_rows(
                rows, kv, vocab_size=2, max_model_len=SPLIT_KEYS + 1, device=device
            )
            keys = torch.ones((batch.num_tokens, *shape), dtype=dtype, device=device)
            queries = keys.repeat_interleave(num_heads // layout.num_kv_heads, 1)
            plan = attention.plan(batch, [None], dtype)[None]
            attention.store(kv, 0, keys, keys, batch)
            attention.attend(kv, 0, queries, keys, keys, plan)
        ops, row = ops_for(is_exact=is_exact), keys.flatten(1)
        ops.linear(row, row, None)
        ops.rms_norm(row, row[0], 1e-6)
        ops.add_norm(row, row, row[0], 1e-6)
        ops.rotate(keys, keys[:, :1].contiguous(), keys[:, :1].contiguous())
        ops.gate(row)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _kernels() -> Any:
    """Import them at first use: triton may be missing, and takes a while."""
    from shared.engine.attention import triton_kernels

    return triton_kernels
