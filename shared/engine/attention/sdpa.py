"""Paged attention in plain torch: gather a row's KV by slot, then scaled_dot_product_attention.

Single-token rows go in groups of similar length; a group's padding points at the row's own first
slot and is masked, so no row ever reads another sequence's memory, not even stale one. Grouped
heads cost no copies: for single tokens the head group is folded into the query length, for chunks
the key/value heads become the batch and are repeated with stride 0 (``enable_gqa`` with a mask is
several times slower on CPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from shared.engine.batch import RowExtent, StepBatch
from shared.engine.gpu.upload import to_device
from shared.engine.memory.paged_kv import PagedKv, slots_of

MAX_PADDING = 0.25
"""Largest share of a group's gathered slots that may be padding of its shortest row."""

MAX_GROUP_SLOTS = 1 << 15
"""Slots gathered at once for a group: bounds the temporary memory of a large batch."""


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Single-token rows [first, last) of the batch.

    slots: int64 ``[(last - first) * length]``. mask: additive, ``[last - first, 1, 1, length]``, or
    None if all rows have the same length.
    """

    first: int
    last: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk at tokens [first, last).

    slots: where its keys lie in the pool; None if they are just this step's keys.
    mask: additive, ``[last - first, num_keys]``; None = plain causal over this step's keys.
    """

    first: int
    last: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """How one step attends in layers of one window."""

    singles: tuple[SingleGroup, ...]
    chunks: tuple[Chunk, ...]


class SdpaAttention:
    """The backend that runs everywhere torch does."""

    has_static_plans = False

    def plan(
        self, batch: StepBatch, windows: Iterable[int | None], dtype: torch.dtype
    ) -> dict[int | None, SdpaPlan]:
        singles = batch.extents[: batch.num_single]
        chunks = batch.extents[batch.num_single :]
        device = batch.slots.device
        return {
            window: SdpaPlan(
                tuple(_plan_singles(singles, batch.block_size, window, dtype, device)),
                tuple(
                    _plan_chunk(extent, batch.block_size, window, dtype, device)
                    for extent in chunks
                ),
            )
            for window in dict.fromkeys(windows)
        }

    def store(
        self, kv: PagedKv, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch
    ) -> None:
        kv.write(layer, keys, values, batch.slots)

    def attend(
        self,
        kv: PagedKv,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: SdpaPlan,
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        key_pool, value_pool = kv.keys[layer], kv.values[layer]
        for group in plan.singles:
            part = slice(group.first, group.last)
            out[part] = _attend_singles(
                queries[part],
                key_pool.index_select(0, group.slots),
                value_pool.index_select(0, group.slots),
                group.mask,
            )
        for chunk in plan.chunks:
            part = slice(chunk.first, chunk.last)
            if chunk.slots is None:
                chunk_keys, chunk_values = keys[part], values[part]
            else:
                chunk_keys = key_pool.index_select(0, chunk.slots)
                chunk_values = value_pool.index_select(0, chunk.slots)
            out[part] = _attend_chunk(queries[part], chunk_keys, chunk_values, chunk.mask)
        return out


def _attend_singles(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """queries [n, num_heads, D]; keys, values [n * length, num_kv_heads, D]."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    folded = queries.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    per_row = (num_rows, -1, num_kv_heads, head_dim)
    out = scaled_dot_product_attention(
        folded, keys.view(per_row).transpose(1, 2), values.view(per_row).transpose(1, 2), mask
    )
    return out.reshape(num_rows, num_heads, head_dim)


def _attend_chunk(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """queries [n, num_heads, D]; keys, values [num_keys, num_kv_heads, D]."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [num_kv_heads, group, tokens, D], the keys repeated without being copied.
    grouped = queries.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    spread = (num_kv_heads, group, keys.shape[0], head_dim)
    out = scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(1).expand(spread),
        values.transpose(0, 1).unsqueeze(1).expand(spread),
        mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _plan_singles(
    extents: tuple[RowExtent, ...],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterable[SingleGroup]:
    """Cut rows (longest first) into groups with little padding."""
    lengths = [_num_visible(extent.stop, window) for extent in extents]
    begin = 0
    while begin < len(lengths):
        longest = lengths[begin]
        end = begin + 1
        while (
            end < len(lengths)
            and lengths[end] >= longest * (1 - MAX_PADDING)
            and (end + 1 - begin) * longest <= MAX_GROUP_SLOTS
        ):
            end += 1
        yield _single_group(extents[begin:end], lengths[begin:end], block_size, dtype, device)
        begin = end


def _single_group(
    extents: tuple[RowExtent, ...],
    lengths: list[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> SingleGroup:
    longest = lengths[0]
    slots = np.empty((len(extents), longest), dtype=np.int64)
    for row, extent, length in zip(slots, extents, lengths, strict=True):
        row[:length] = slots_of(extent.blocks, extent.stop - length, extent.stop, block_size)
        row[length:] = row[0]
    mask = None
    if lengths[-1] != longest:
        padded = np.arange(longest) >= np.asarray(lengths)[:, None]
        mask = _additive(to_device(padded, device), dtype)[:, None, None, :]
    flat = to_device(slots.reshape(-1), device)
    return SingleGroup(extents[0].first, extents[-1].last, flat, mask)


def _plan_chunk(
    extent: RowExtent,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Chunk:
    if extent.start == 0 and (window is None or extent.stop <= window):
        return Chunk(extent.first, extent.last, None, None)
    # The first query's window decides how far back any of them looks.
    begin = extent.start + 1 - _num_visible(extent.start + 1, window)
    queries = torch.arange(extent.start, extent.stop, device=device)[:, None]
    keys = torch.arange(begin, extent.stop, device=device)[None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    slots = None
    if extent.start > 0:
        slots = to_device(slots_of(extent.blocks, begin, extent.stop, block_size), device)
    return Chunk(extent.first, extent.last, slots, _additive(hidden, dtype))


def _num_visible(num_tokens: int, window: int | None) -> int:
    """How many positions the last of ``num_tokens`` tokens sees, itself included."""
    return num_tokens if window is None else min(num_tokens, window)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf where hidden; in the queries' dtype, so that no kernel converts it."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))
