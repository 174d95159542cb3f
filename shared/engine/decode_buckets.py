"""Decode steps over padded batches: static buffers, one recording a bucket, replayed each step.

A decode step of a small batch is hundreds of short kernels, and Python queues them more slowly than
a GPU computes them. A recorded step is queued in one call, but its shapes are fixed. So batches are
filled up to the next of a few sizes:

    rows      r0 r1 r2 r3 r4 | p  p  p       5 rows in the bucket of 8; every p writes its token's
                                             KV to the pool's padding block, one position long
    splits    0  1 1 1 2 ... | - - - -       of long rows (``PagedRows``), in room for as many as
                                             the pool can hold

What a padding row computes nobody reads. Sampling is not recorded: logits are queued by Python
while the device still computes the layers, and so cost no time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import structlog
import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.batch import (
    SPLIT_KEYS,
    PagedRows,
    StepBatch,
    check_tokens,
    num_blocks_needed,
)
from shared.engine.block_tables import BlockTables
from shared.engine.models.decoder import Decoder
from shared.engine.paged_kv import PagedKv
from shared.engine.recording import Recorder, Work
from shared.engine.streams import Streams
from shared.step import StepRow

_log = structlog.get_logger(__name__)

MAX_TABLE_BLOCKS = 1 << 21
"""Blocks that all rows may name together (16 MiB of tables), each as many; a batch with a row that
names more is not replayed."""

_SHARED = 2
"""How often the splits of a full pool have room: rows with a common prefix name its blocks each."""

_NUM_COLUMNS = 5
"""Per row: token id, position, slot, stop (position + 1), place of its table."""

_POSITIONS = 1


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return batch sizes up to ``largest``, ascending: 1, 2, 4, 8, then every 8th to 64, then every
    16th."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, largest, 16))
    return (*(size for size in usual if size < largest), largest)


class DecodeBuckets:
    """Runs steps of single-token rows. Compute thread only; inside ``Streams.computing``."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKv,
        attention: AttentionBackend,
        *,
        max_rows: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """max_rows: of the largest bucket. kv needs a padding block, attention static plans."""
        assert attention.has_static_plans
        self._decoder = decoder
        self._kv = kv
        self._attention = attention
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        blocks_per_row = -(-max_model_len // kv.block_size)
        width = min(blocks_per_row, MAX_TABLE_BLOCKS // max_rows)
        self._tables = BlockTables(kv, num_rows=max_rows, width=width, device=device)
        self._splits_per_row = -(-max_model_len // SPLIT_KEYS)
        self._splits_of_pool = _SHARED * (kv.num_blocks * kv.block_size // SPLIT_KEYS)
        sizes = (_NUM_COLUMNS * max_rows, max_rows + 1, self._room(max_rows))
        host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        # Views of the one buffer that travels in one copy.
        self._host_numbers = host
        columns, split_at, split_rows = host.split(sizes)
        self._columns = columns.view(_NUM_COLUMNS, max_rows).numpy()
        self._split_at, self._split_rows = split_at.numpy(), split_rows.numpy()
        padding = (0, 0, kv.num_blocks * kv.block_size, 1, 0)
        self._padding = np.array(padding, dtype=np.int64)[:, None]
        self._columns[:] = self._padding
        self._device_numbers = torch.empty_like(host, device=device)
        columns, self._splits_on_device, self._rows_on_device = self._device_numbers.split(sizes)
        self._columns_on_device = columns.view(_NUM_COLUMNS, max_rows)
        self._firsts = torch.arange(max_rows + 1, device=device)
        self._counts: np.ndarray | None = None
        self._recordings: dict[int, Work] = {}
        self._sizes: list[int] = []

    @property
    def sizes(self) -> Sequence[int]:
        """The recorded buckets, ascending."""
        return self._sizes

    def record(self, recorder: Recorder) -> None:
        """Record all buckets, the largest first; those that memory has no room for are left out."""
        wanted = bucket_sizes(self._max_rows)
        began_at = time.perf_counter()
        for done, size in enumerate(reversed(wanted)):
            self._write_splits(size)  # of padding alone, as yet
            self._device_numbers.copy_(self._host_numbers)
            try:
                self._recordings[size] = recorder.record(lambda size=size: self._forward(size))
            except torch.OutOfMemoryError as error:
                _log.warning(
                    "no memory to record decode steps of this size; such steps are not replayed",
                    num_rows=size,
                    error=str(error).splitlines()[0],
                )
            else:
                _log.info("decode steps recorded", num_rows=size, done=done + 1, of=len(wanted))
        self._sizes = sorted(self._recordings)
        seconds = round(time.perf_counter() - began_at, 2)
        _log.info("recording done", sizes=len(self._sizes), seconds=seconds)

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor | None:
        """Run the step and return a hidden state a row, or None: it is not a step of single tokens,
        or larger than any bucket.

        Raises LocalProtocolError: see ``Forward.run``.
        """
        place = bisect_left(self._sizes, len(rows))
        if place == len(self._sizes) or any(len(row.token_ids) != 1 for row in rows):
            return None
        size = self._sizes[place]
        if not self._fill(rows, size):
            return None
        return self._recordings[size]()[: len(rows)]

    def _room(self, size: int) -> int:
        """Return for how many splits a bucket has programs; those that are not needed end at once.

        Not the most that its rows could have: that many would take longer to start than the work.
        """
        return min(size * self._splits_per_row, size + self._splits_of_pool)

    def _write_splits(self, size: int) -> bool:
        """Write how ``size`` rows are split, by their positions; False if that are too many."""
        counts = self._columns[_POSITIONS, :size] // SPLIT_KEYS + 1
        if self._counts is not None and np.array_equal(
            counts, self._counts
        ):  # mostly: a row has another every 256 steps
            return True
        self._counts = counts
        split_at = self._split_at[: size + 1]
        counts.cumsum(out=split_at[1:])
        total, room = int(split_at[size]), self._room(size)
        if total > room:
            self._counts = None
            return False
        self._split_rows[:total] = np.repeat(np.arange(size), counts)
        self._split_rows[total:room] = -1
        return True

    def _fill(self, rows: Sequence[StepRow], size: int) -> bool:
        """Write the rows' numbers into the static buffers; False if they do not fit."""
        kv, count = self._kv, len(rows)
        counts = [num_blocks_needed(row, kv, self._max_model_len) for row in rows]
        token_ids, positions, slots, stops, at = self._columns[:, :count]
        token_ids[:] = [row.token_ids[0] for row in rows]
        check_tokens(token_ids, self._decoder.config.vocab_size)
        places = self._tables.places([row.block_table for row in rows], counts)
        if places is None:
            return False
        at[:] = places
        positions[:] = [row.start for row in rows]
        lasts = [row.block_table[num - 1] for row, num in zip(rows, counts, strict=True)]
        slots[:] = np.array(lasts) * kv.block_size + positions % kv.block_size
        stops[:] = positions + 1
        self._columns[:, count:size] = self._padding
        if not self._write_splits(size):
            return False
        # A step ends with its tokens on the host: nobody reads this buffer for the one before.
        self._device_numbers.copy_(self._host_numbers, non_blocking=True)
        return True

    def _forward(self, size: int) -> torch.Tensor:
        """Queue one step of the first ``size`` static rows."""
        token_ids, positions, slots, stops, table_at = self._columns_on_device[:, :size]
        paged = PagedRows(
            stops=stops,
            firsts=self._firsts[: size + 1],
            table_at=table_at,
            tables=self._tables.blocks,
            split_at=self._splits_on_device[: size + 1],
            split_rows=self._rows_on_device[: self._room(size)],
        )
        batch = StepBatch(token_ids, positions, slots, paged, (), size, self._kv.block_size)
        # No marks for copies: see streams.py.
        return self._decoder.forward(batch, self._kv, self._attention, Streams(), None)
