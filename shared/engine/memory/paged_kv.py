"""The pool of KV blocks, and copies between it and the wire.

One key and one value tensor per layer, ``[num_blocks, block_size, num_kv_heads, head_dim]``: a
single stacked tensor would be copied whole by every compiled step that writes a slice of it. Who
owns which block is nobody's business here; see ``shared/kv``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shared.engine.memory import huge_pages
from shared.engine.memory.kv_copies import DeviceCopies, HostCopies
from shared.errors import LocalProtocolError
from shared.kv.layout import KvLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def slots_of(
    block_table: Sequence[int] | np.ndarray, start: int, stop: int, block_size: int
) -> np.ndarray:
    """Return the slots (``block * block_size + offset``) of positions [start, stop); int64."""
    first = start // block_size
    last = -(-stop // block_size)
    blocks = np.asarray(block_table[first:last], dtype=np.int64)
    if len(blocks) != last - first:
        raise LocalProtocolError(
            f"a block table of {len(block_table)} blocks does not cover position {stop - 1}"
        )
    offsets = np.arange(block_size, dtype=np.int64)
    slots = (blocks[:, None] * block_size + offsets).reshape(-1)
    skipped = first * block_size
    return slots[start - skipped : stop - skipped]


def check_blocks(blocks: np.ndarray, num_blocks: int) -> None:
    """Raise LocalProtocolError if a block is not of a pool of so many."""
    if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks):
        raise LocalProtocolError(f"block outside this pool of {num_blocks} blocks")


class PagedKv:
    """Keys and values of every layer, addressed by slot.

        blocks   0 ........ num_blocks - 1 | padding blocks
                 rows may name these       | rows that only pad a batch write and read here

    Blocks hold zeros until written, and stale but finite KV of earlier owners afterwards; nothing
    may read a slot that its own sequence has not written.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        num_padding: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks + num_padding, block_size, layout.num_kv_heads, layout.head_dim)
        dtype = TORCH_DTYPES[layout.dtype]

        self.key_blocks, self.value_blocks = (
            [huge_pages.tensor(shape, dtype, device) for _ in range(layout.num_layers)]
            for _ in range(2)
        )
        # [slots, num_kv_heads, head_dim] views of the same memory.
        self.keys = [pool.flatten(0, 1) for pool in self.key_blocks]
        self.values = [pool.flatten(0, 1) for pool in self.value_blocks]
        copies = HostCopies if device.type == "cpu" else DeviceCopies
        self.copies = copies(list(zip(self.keys, self.values, strict=True)))

    def arrays(self) -> list[np.ndarray]:
        """Return the memory of every tensor, as octets; none if it is a device's."""
        tensors = [*self.key_blocks, *self.value_blocks]
        return [one.view(torch.uint8).numpy() for one in tensors if one.device.type == "cpu"]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store ``[num_tokens, num_kv_heads, head_dim]`` keys and values at these slots."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)
