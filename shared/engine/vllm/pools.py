"""KV between the layouts that vLLM keeps it in and the wire's (``shared/kv/layout.py``).

The wire has all heads of a token side by side, so it does not matter over how many ranks either end
divides them: every pool here holds its own heads, and copies its own part of a frame. Knows no
vLLM.

A rank's pool of one layer, as vLLM registers it with a connector:

    attention   [num_blocks, heads, block_size, 2 * head_dim]
                CPU: in a block and head the keys, transposed [head_dim, block_size], then the
                values [block_size, head_dim]; as tiles for AMX, which multiplies pairs, the keys
                [block_size / 16, head_dim / 2, 16 tokens, 2 numbers], then the values
                [head_dim / 16, block_size / 2, 16 numbers, 2 tokens]; elsewhere a key and its
                value side by side
    MLA         [num_blocks, block_size, width]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from shared.engine.memory.kv_copies import KvCopies
from shared.engine.memory.staging import is_on_device
from shared.errors import EngineFailed
from shared.kv.layout import DTYPE_BYTES, KvLayout

_OCTETS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}
"""Bytes of an element -> types that hold its bits: copies look at no value, and numpy knows neither
bfloat16 nor fp8."""

_TILE = 16
"""Rows of AMX's tiles, and pairs in each."""


class _Axes(Enum):
    """What a pool is indexed by."""

    ROWS = "block, head, offset, dim"
    COLUMNS = "block, head, dim, offset"
    KEY_TILES = "block, head, offset // 16, dim // 2, offset % 16"  # of pairs
    VALUE_TILES = "block, head, dim // 16, offset // 2, dim % 16, offset % 2"


class _Part(NamedTuple):
    """One kind of KV of one layer and one rank: what to index with (block, offset).

    part: 0 = keys or the only one, 1 = values. heads: those of the wire that lie here.
    """

    pool: Any
    part: int
    heads: slice
    axes: _Axes


class HostPools(KvCopies):
    """Pools in memory of this host: this process's, or mapped from its ranks'."""

    def __init__(
        self,
        ranks: Sequence[Sequence[torch.Tensor]],
        layout: KvLayout,
        block_size: int,
        *,
        is_tiled: bool = False,
    ) -> None:
        """ranks: [rank][layer]. is_tiled: for AMX."""
        self._layout, self._block_size = layout, block_size
        _, self._dtype = _OCTETS[DTYPE_BYTES[layout.dtype]]
        self._pools = [pool for pools in ranks for pool in pools]
        self._layers: list[list[_Part]] = []
        for pools in ranks:
            _require_uniform(pools, layout, len(ranks))
        for pools in zip(*ranks, strict=True):
            parts: list[_Part] = []
            for heads, pool in zip(_heads(len(ranks), layout), pools, strict=True):
                parts += _host_parts(pool, heads, layout, is_tiled=is_tiled)
            self._layers.append(parts)

    def gather(self, slots: np.ndarray, first_layer: int, last_layer: int, out: Any) -> None:
        places = np.divmod(slots, self._block_size)
        for wire, it in self._each(first_layer, last_layer, len(slots), out):
            wire[:] = it.pool[_index(it, *places)]

    def scatter(self, slots: np.ndarray, first_layer: int, last_layer: int, data: Any) -> None:
        places = np.divmod(slots, self._block_size)
        for wire, it in self._each(first_layer, last_layer, len(slots), data):
            it.pool[_index(it, *places)] = wire

    def arrays(self) -> list[np.ndarray]:
        return [pool.view(torch.uint8).numpy() for pool in self._pools]

    def _each(
        self, first_layer: int, last_layer: int, num_tokens: int, buffer: Any
    ) -> Iterator[tuple[np.ndarray, _Part]]:
        shape = _frame_shape(self._layout, last_layer - first_layer, num_tokens)
        num_bytes = int(np.prod(shape)) * np.dtype(self._dtype).itemsize
        octets = np.frombuffer(memoryview(buffer).cast("B"), np.uint8, count=num_bytes)
        frame = octets.view(self._dtype).reshape(shape)
        for layer in range(first_layer, last_layer):
            for it in self._layers[layer]:
                wire = frame[layer - first_layer, it.part, :, it.heads].view(it.pool.dtype)
                if it.axes is _Axes.VALUE_TILES:
                    wire = wire.reshape(*wire.shape[:2], -1, _TILE)
                yield wire, it


class DevicePools(KvCopies):
    """Pools of one rank on a device, where a key and its value lie side by side."""

    def __init__(self, pools: Sequence[torch.Tensor], layout: KvLayout, block_size: int) -> None:
        """pools: one a layer."""
        _require_uniform(pools, layout, 1)
        self._layout, self._block_size = layout, block_size
        self._type, _ = _OCTETS[DTYPE_BYTES[layout.dtype]]
        every_head = slice(0, layout.num_kv_heads)
        self._layers = [
            [
                _Part(part, idx, every_head, _Axes.ROWS)
                for idx, part in enumerate(_side_by_side(pool.view(self._type), layout))
            ]
            for pool in pools
        ]

    def gather(self, slots: np.ndarray, first_layer: int, last_layer: int, out: Any) -> None:
        at = self._places(slots)
        for wire, it in self._each(first_layer, last_layer, len(slots), out):
            wire.copy_(it.pool[at[0], :, at[1]])

    def scatter(self, slots: np.ndarray, first_layer: int, last_layer: int, data: Any) -> None:
        at = self._places(slots)
        for wire, it in self._each(first_layer, last_layer, len(slots), data):
            it.pool[at[0], :, at[1]] = wire.to(it.pool.device)  # one of a tier is the host's

    def arrays(self) -> list[np.ndarray]:
        return []

    def _places(self, slots: np.ndarray) -> list[torch.Tensor]:
        device = self._layers[0][0].pool.device
        places = np.divmod(slots, self._block_size)
        return [torch.from_numpy(numbers).to(device) for numbers in places]

    def _each(
        self, first_layer: int, last_layer: int, num_tokens: int, buffer: Any
    ) -> Iterator[tuple[torch.Tensor, _Part]]:
        shape = _frame_shape(self._layout, last_layer - first_layer, num_tokens)
        octets = (
            buffer if is_on_device(buffer) else torch.from_numpy(np.frombuffer(buffer, np.uint8))
        )
        num_bytes = int(np.prod(shape)) * self._type.itemsize
        frame = octets[:num_bytes].view(self._type).view(shape)
        for layer in range(first_layer, last_layer):
            for it in self._layers[layer]:
                yield frame[layer - first_layer, it.part], it


Pools = HostPools | DevicePools


def _require_uniform(pools: Sequence[torch.Tensor], layout: KvLayout, num_ranks: int) -> None:
    """Raises EngineFailed: there is KV that frames have no place for."""
    sizes = {pool.element_size() for pool in pools}
    if len(pools) != layout.num_layers or sizes != {DTYPE_BYTES[layout.dtype]}:
        raise EngineFailed(
            f"vLLM keeps {len(pools)} kinds of KV for {layout.num_layers} layers, with numbers of "
            f"{sorted(sizes)} bytes: what is handed over is one kind a layer, all in {layout.dtype}"
        )
    for pool in pools:
        if pool.shape[-1] != layout.parts * layout.head_dim:
            raise EngineFailed(
                f"vLLM's KV has {pool.shape[-1]} numbers a token and head, where the model's heads "
                f"have {layout.head_dim}: keys and values must be of one size, in all layers"
            )
        num_heads = max(1, layout.num_kv_heads // num_ranks)
        if pool.dim() == 4 and pool.shape[1] != num_heads:
            raise EngineFailed(
                f"vLLM's KV has {pool.shape[1]} heads in a layer, where the model has {num_heads}: "
                "all layers must have as many"
            )


def _frame_shape(layout: KvLayout, num_layers: int, num_tokens: int) -> tuple[int, ...]:
    return num_layers, layout.parts, num_tokens, layout.num_kv_heads, layout.head_dim


def _heads(num_ranks: int, layout: KvLayout) -> list[slice]:
    """The wire's heads of each rank. Where there are more ranks than heads (a latent vector has
    one), each has a whole copy, and writes the same bytes."""
    if num_ranks >= layout.num_kv_heads:
        copies = num_ranks // layout.num_kv_heads
        firsts = [rank // copies for rank in range(num_ranks)]
        return [slice(first, first + 1) for first in firsts]
    each = layout.num_kv_heads // num_ranks
    return [slice(rank * each, (rank + 1) * each) for rank in range(num_ranks)]


def _host_parts(
    pool: torch.Tensor, heads: slice, layout: KvLayout, *, is_tiled: bool
) -> list[_Part]:
    bits, _ = _OCTETS[pool.element_size()]
    if layout.parts == 1:
        (view,) = _side_by_side(pool.view(bits), layout)
        return [_Part(view.numpy(), 0, heads, _Axes.ROWS)]
    num_blocks, num_heads, block_size, width = pool.shape
    dim = width // 2
    whole = pool.view(bits).numpy()
    keys, values = np.moveaxis(whole.reshape(num_blocks, num_heads, 2, block_size * dim), 2, 0)
    if is_tiled:
        _, pairs = _OCTETS[2 * pool.element_size()]
        key_axes, value_axes = _Axes.KEY_TILES, _Axes.VALUE_TILES
        keys = keys.view(pairs).reshape(num_blocks, num_heads, -1, dim // 2, _TILE)
        values = values.reshape(num_blocks, num_heads, -1, block_size // 2, _TILE, 2)
    else:
        key_axes, value_axes = _Axes.COLUMNS, _Axes.ROWS
        keys = keys.reshape(num_blocks, num_heads, dim, block_size)
        values = values.reshape(num_blocks, num_heads, block_size, dim)
    if not (np.may_share_memory(keys, whole) and np.may_share_memory(values, whole)):
        raise EngineFailed("vLLM's KV is not laid out as this release expects")
    return [_Part(keys, 0, heads, key_axes), _Part(values, 1, heads, value_axes)]


def _side_by_side(pool: torch.Tensor, layout: KvLayout) -> Sequence[torch.Tensor]:
    """Views [block, head, offset, dim] of a pool in which the parts of a token lie side by side."""
    if pool.dim() == 3:
        pool = pool.unsqueeze(1)  # a latent vector: one head
    return pool.split(layout.head_dim, dim=-1)


def _index(it: _Part, blocks: np.ndarray, offsets: np.ndarray) -> tuple[Any, ...]:
    """What picks ``[token, head, dim]``: numpy puts the indexed axes first. Of tiles it picks pairs
    of dims, and dims by sixteens."""
    every = slice(None)
    match it.axes:
        case _Axes.ROWS:
            return blocks, every, offsets
        case _Axes.COLUMNS:
            return blocks, every, every, offsets
        case _Axes.KEY_TILES:
            return blocks, every, offsets // _TILE, every, offsets % _TILE
        case _Axes.VALUE_TILES:
            return blocks, every, every, offsets // 2, every, offsets % 2
