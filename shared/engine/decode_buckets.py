"""Decode steps over padded batches: static buffers, one recording a bucket, replayed each step.

A decode step of a small batch is hundreds of short kernels, and Python queues them more slowly than
a GPU computes them. A recorded step is queued in one call, but its shapes are fixed. So batches are
filled up to the next of a few sizes:

    rows      r0 r1 r2 r3 r4 | p  p  p       5 rows in the bucket of 8
    tables    P | r0's blocks | r1's ...     P: the pool's padding block, where every p writes its
                                             token's KV and reads it back, one position long

What a padding row computes nobody reads. Sampling is not recorded: logits are queued by Python
while the device still computes the layers, and so cost no time.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import structlog
import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.batch import PagedRows, StepBatch, check_tokens, num_blocks_needed
from shared.engine.models.decoder import Decoder
from shared.engine.paged_kv import PagedKv
from shared.engine.recording import Recorder, Recording
from shared.engine.streams import InlineStreams
from shared.step import StepRow

_log = structlog.get_logger(__name__)

MAX_TABLE_BLOCKS = 1 << 21
"""Most blocks that all rows may name together (16 MiB of table); batches with more are not
replayed."""

_NUM_COLUMNS = 5
"""Per row: token id, position, slot, stop (position + 1), place of its table."""


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
        num_table = 1 + min(MAX_TABLE_BLOCKS, max_rows * blocks_per_row)
        total = _NUM_COLUMNS * max_rows + num_table
        self._device_numbers = torch.zeros(total, dtype=torch.int64, device=device)
        host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_numbers = host
        # Views of the one host buffer that travels in one copy.
        self._columns = host[: _NUM_COLUMNS * max_rows].view(_NUM_COLUMNS, max_rows).numpy()
        self._tables = host[_NUM_COLUMNS * max_rows :].numpy()
        padding_block = kv.num_blocks
        padding = (0, 0, padding_block * kv.block_size, 1, 0)
        self._padding = np.array(padding, dtype=np.int64)[:, None]
        self._columns[:] = self._padding
        self._tables[0] = padding_block
        self._firsts = torch.arange(max_rows + 1, device=device)
        self._device_numbers.copy_(host)
        self._recordings: dict[int, Recording] = {}
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
        return self._recordings[size].replay()[: len(rows)]

    def _fill(self, rows: Sequence[StepRow], size: int) -> bool:
        """Write the rows' numbers into the static buffers; False if their tables do not fit."""
        kv, count = self._kv, len(rows)
        tables, table_at = array("i"), array("i")
        for row in rows:
            table_at.append(1 + len(tables))
            tables.extend(row.block_table[: num_blocks_needed(row, kv, self._max_model_len)])
        last = 1 + len(tables)
        if last > len(self._tables):
            return False
        self._tables[1:last] = tables
        kv.check_blocks(self._tables[1:last])
        token_ids, positions, slots, stops, at = self._columns[:, :count]
        token_ids[:] = [row.token_ids[0] for row in rows]
        check_tokens(token_ids, self._decoder.config.vocab_size)
        positions[:] = [row.start for row in rows]
        at[:] = table_at
        blocks = self._tables[at + positions // kv.block_size]
        slots[:] = blocks * kv.block_size + positions % kv.block_size
        stops[:] = positions + 1
        self._columns[:, count:size] = self._padding
        # A step ends with its tokens on the host: nobody reads this buffer for the one before.
        used = _NUM_COLUMNS * self._max_rows + last
        self._device_numbers[:used].copy_(self._host_numbers[:used], non_blocking=True)
        return True

    def _forward(self, size: int) -> torch.Tensor:
        """Queue one step of the first ``size`` static rows."""
        columns = self._device_numbers[: _NUM_COLUMNS * self._max_rows]
        token_ids, positions, slots, stops, table_at = columns.view(_NUM_COLUMNS, -1)[:, :size]
        tables = self._device_numbers[_NUM_COLUMNS * self._max_rows :]
        paged = PagedRows(stops, self._firsts[: size + 1], table_at, tables)
        batch = StepBatch(token_ids, positions, slots, paged, (), size, self._kv.block_size)
        # No marks for copies: see streams.py.
        return self._decoder.forward(batch, self._kv, self._attention, InlineStreams(), None)
