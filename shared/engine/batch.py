"""One step's rows, flattened: all tokens of all rows in one line, so that one pass serves them all.

Selective batching as in Orca (Yu et al. 2022, section 3.2): everything but attention sees only
``[num_tokens, hidden]``; attention is told where each row's tokens lie. Rows are reordered so that
single-token rows come first, longest first, because attention groups them by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.paged_kv import PagedKv, slots_of
from shared.errors import LocalProtocolError
from shared.step import StepRow


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Where one row's tokens lie.

        batch      ... first ........... last ...        flat indices of the tokens computed now
        sequence   0 .... start ......... stop           positions; [0, start) is in the pool
        slots      one per position in [0, stop)

    row_idx: the row's place in the caller's list.
    """

    row_idx: int
    first: int
    last: int
    start: int
    slots: np.ndarray

    @property
    def stop(self) -> int:
        """Number of tokens of the sequence once this step is done."""
        return self.start + self.last - self.first


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step as tensors on the device.

    token_ids, positions, slots: int64 ``[num_tokens]``. extents: batch order; the first
    ``num_single`` of them have one token each, longest sequence first.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    extents: tuple[RowExtent, ...]
    num_single: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return self.extents[-1].last


def flatten_rows(
    rows: Sequence[StepRow],
    kv: PagedKv,
    *,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
) -> StepBatch:
    """Lay the rows out for one pass.

    Raises LocalProtocolError: a row is empty, too long, names unknown tokens or blocks, or its
    block table is too short. On a GPU any of these would take the whole device down, so they are
    checked.
    """
    singles = [idx for idx, row in enumerate(rows) if len(row.token_ids) == 1]
    singles.sort(key=lambda idx: -rows[idx].start)  # stable: equal rows keep their order
    chunks = [idx for idx, row in enumerate(rows) if len(row.token_ids) != 1]
    extents: list[RowExtent] = []
    num_tokens = 0
    for idx in [*singles, *chunks]:
        row = rows[idx]
        length = len(row.token_ids)
        stop = row.start + length
        if length == 0 or row.start < 0 or stop > max_model_len:
            raise LocalProtocolError(
                f"a row of {length} tokens from position {row.start} does not fit "
                f"max_model_len {max_model_len}"
            )
        slots = slots_of(row.block_table, 0, stop, kv.block_size)
        extents.append(RowExtent(idx, num_tokens, num_tokens + length, row.start, slots))
        num_tokens += length
    # One host buffer, one transfer to the device.
    packed = np.empty((3, num_tokens), dtype=np.int64)
    for extent in extents:
        part = slice(extent.first, extent.last)
        packed[0, part] = rows[extent.row_idx].token_ids
        packed[1, part] = np.arange(extent.start, extent.stop)
        packed[2, part] = extent.slots[extent.start :]
        kv.check_blocks(extent.slots // kv.block_size)
    if int(packed[0].min()) < 0 or int(packed[0].max()) >= vocab_size:
        raise LocalProtocolError(f"token id outside this model's vocabulary of {vocab_size}")
    token_ids, positions, slots = torch.from_numpy(packed).to(device)
    return StepBatch(token_ids, positions, slots, tuple(extents), len(singles))
