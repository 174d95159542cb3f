"""One step's rows, flattened: all tokens of all rows in one line, so that one pass serves them all.

Selective batching as in Orca (Yu et al. 2022, section 3.2): everything but attention sees only
``[num_tokens, hidden]``; attention is told where each row's tokens lie. Rows are reordered so that
single-token rows come first, longest first, because attention groups them by length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from shared.engine.gpu.upload import to_device
from shared.engine.memory.paged_kv import PagedKv, check_blocks, slots_of
from shared.errors import LocalProtocolError
from shared.step import StepRow


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Where one row's tokens lie.

        batch      ... first ........... last ...        flat indices of the tokens computed now
        sequence   0 .... start ......... stop           positions; [0, start) is in the pool
        blocks     one per block_size positions of [0, stop)

    row_idx: the row's place in the caller's list.
    """

    row_idx: int
    first: int
    last: int
    start: int
    blocks: np.ndarray

    @property
    def stop(self) -> int:
        """Number of tokens of the sequence once this step is done."""
        return self.start + self.last - self.first


SPLIT_KEYS = 256
"""Positions of a row that one program attends to, where rows are split (``PagedRows``): enough that
what a split writes is little beside what it reads, few enough that one row fills a GPU."""


class PagedRows(NamedTuple):
    """Where the rows lie, for kernels that walk block tables themselves; int64, on the device.

        tables    b b b b | b b | b b b ...       blocks of all rows, one row after the other
        table_at  0         4     6               where each row's blocks begin

    stops: ``[num_rows]``, tokens of the sequence once the step is done. firsts: ``[num_rows + 1]``,
    flat index of each row's first token, and the number of tokens.

    Single-token rows are split by position, row 0's first:

        split_rows   0 0 0 | 1 | 2 2 | ...        each split's row
        split_at     0       3   4     6          where each row's begin, and their number
    """

    stops: torch.Tensor
    firsts: torch.Tensor
    table_at: torch.Tensor
    tables: torch.Tensor
    split_at: torch.Tensor
    split_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step as tensors on the device.

    token_ids, positions, slots: int64 ``[num_tokens]``. extents: batch order; the first
    ``num_single`` of them have one token each, longest sequence first.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    paged: PagedRows
    extents: tuple[RowExtent, ...]
    num_single: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


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
    order = [*singles, *(idx for idx, row in enumerate(rows) if len(row.token_ids) != 1)]
    firsts, table_at = [0], [0]
    tables = array("i")
    for idx in order:
        row = rows[idx]
        tables.extend(row.block_table[: num_blocks_needed(row, kv, max_model_len)])
        firsts.append(firsts[-1] + len(row.token_ids))
        table_at.append(len(tables))
    num_rows, num_tokens = len(rows), firsts[-1]
    # One host buffer, one transfer to the device.
    num_single = len(singles)
    splits_of = [rows[idx].start // SPLIT_KEYS + 1 for idx in singles]
    split_at = [0, *accumulate(splits_of)]
    sizes = (
        *(num_tokens, num_tokens, num_tokens),
        *(num_rows, num_rows + 1, num_rows, len(tables)),
        *(num_single + 1, split_at[-1]),
    )
    ends = list(accumulate(sizes))
    packed = np.empty(ends[-1], dtype=np.int64)
    parts = [packed[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    token_ids, positions, slots, stops, all_firsts, all_table_at, blocks, *splits = parts
    all_firsts[:], all_table_at[:], blocks[:] = firsts, table_at[:-1], tables
    splits[0][:], splits[1][:] = split_at, np.repeat(np.arange(num_single), splits_of)
    check_blocks(blocks, kv.num_blocks)
    extents: list[RowExtent] = []
    for place, idx in enumerate(order):
        row = rows[idx]
        own = blocks[table_at[place] : table_at[place + 1]]
        extent = RowExtent(idx, firsts[place], firsts[place + 1], row.start, own)
        part = slice(extent.first, extent.last)
        token_ids[part] = row.token_ids
        positions[part] = np.arange(extent.start, extent.stop)
        slots[part] = slots_of(own, extent.start, extent.stop, kv.block_size)
        stops[place] = extent.stop
        extents.append(extent)
    check_tokens(token_ids, vocab_size)
    on_device = to_device(packed, device).split(sizes)
    return StepBatch(
        token_ids=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        paged=PagedRows(*on_device[3:]),
        extents=tuple(extents),
        num_single=num_single,
        block_size=kv.block_size,
    )


def num_blocks_needed(row: StepRow, kv: PagedKv, max_model_len: int) -> int:
    """Return how many blocks of its table a row reads or writes.

    Raises LocalProtocolError: the row is empty or too long, or its table is too short.
    """
    length = len(row.token_ids)
    stop = row.start + length
    if length == 0 or row.start < 0 or stop > max_model_len:
        raise LocalProtocolError(
            f"a row of {length} tokens from position {row.start} does not fit "
            f"max_model_len {max_model_len}"
        )
    num_blocks = -(-stop // kv.block_size)
    if len(row.block_table) < num_blocks:
        raise LocalProtocolError(
            f"a block table of {len(row.block_table)} blocks does not cover position {stop - 1}"
        )
    return num_blocks


def check_tokens(token_ids: np.ndarray, vocab_size: int) -> None:
    """Raise LocalProtocolError if one of these is no token of the model."""
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise LocalProtocolError(f"token id outside this model's vocabulary of {vocab_size}")
