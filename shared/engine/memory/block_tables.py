"""Block tables of running rows on the device, of which each step writes only what has changed.

A running sequence takes one more block every ``block_size`` tokens, and its other blocks stay. So
a table keeps its place from step to step, whatever place its row has in the batch:

    place    0         width       2 x width      ...
    blocks   P . . .   b b b b .   b b . . .      P: for rows that only pad a batch

A table is known again by the object that holds it: tables grow and never change (``StepRow``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.gpu.upload import to_device
from shared.engine.memory.paged_kv import PagedKv, check_blocks


@dataclass(slots=True)
class _Kept:
    """A table that is there; it is held, so that no other object gets its id."""

    table: Sequence[int]
    place: int
    num_written: int = 0


class BlockTables:
    """Room for the tables of ``num_rows`` rows, ``width`` blocks each. Compute thread only.

    blocks: int64 ``[(num_rows + 1) * width]`` on the device. num_written: blocks written so far,
    for tests and benchmarks.
    """

    def __init__(self, kv: PagedKv, *, num_rows: int, width: int, device: torch.device) -> None:
        """kv: has a padding block."""
        self._kv = kv
        self._width = width
        self._device = device
        self._kept: dict[int, _Kept] = {}
        self._free = [width * (row + 1) for row in range(num_rows)]
        self.blocks = torch.zeros((num_rows + 1) * width, dtype=torch.int64, device=device)
        self.blocks[0] = kv.num_blocks
        self.num_written = 0

    def places(
        self, tables: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> Sequence[int] | None:
        """Return where each table stands, with its first ``counts`` blocks; None: one is too long.

        Raises LocalProtocolError, before anything is written: a block that is not of the pool.
        """
        if max(counts) > self._width:
            return None
        grown: list[tuple[_Kept, int]] = []
        new, at = array("i"), array("q")
        places: list[int] = []
        for table, count in zip(tables, counts, strict=True):
            kept = self._kept.get(id(table))
            if kept is None:
                if not self._free:
                    self._forget_all_but(tables)
                kept = self._kept[id(table)] = _Kept(table, self._free.pop())
            if kept.num_written < count:
                grown.append((kept, count))
                new.extend(table[kept.num_written : count])
                at.extend(range(kept.place + kept.num_written, kept.place + count))
            places.append(kept.place)
        if grown:
            check_blocks(np.asarray(new), self._kv.num_blocks)
            both = to_device(np.stack((at, new)), self._device)
            self.blocks.index_copy_(0, both[0], both[1])
            self.num_written += len(new)
            for kept, count in grown:
                kept.num_written = max(kept.num_written, count)
        return places

    def _forget_all_but(self, tables: Sequence[Sequence[int]]) -> None:
        named = {id(table) for table in tables}
        for key in self._kept.keys() - named:
            self._free.append(self._kept.pop(key).place)
