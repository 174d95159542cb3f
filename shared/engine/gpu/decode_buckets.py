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

A step may be queued behind one whose tokens nobody has read yet. They stay on the device, before
those that the host gives, and a row says which token is its own:

    tokens    t0 t1 t2 ... | g0 g1 g2 ...      t: of the step before; g: in the host's numbers
    sources    0  .  2       .  |  .           rows 0 and 2 go on, row 1 is given its token

There are two buffers of the host's: one may be on its way while the next step's is written.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog
import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.batch import SPLIT_KEYS, PagedRows, StepBatch, check_tokens, num_blocks_needed
from shared.engine.gpu.recording import Recorder, Work
from shared.engine.gpu.streams import Streams
from shared.engine.memory.block_tables import BlockTables
from shared.engine.memory.paged_kv import PagedKv
from shared.engine.models.decoder import Decoder
from shared.step import StepRow, ToCome

_log = structlog.get_logger(__name__)

MAX_TABLE_BLOCKS = 1 << 21
"""Blocks that all rows may name together (16 MiB of tables), each as many; a batch with a row that
names more is not replayed."""

_SHARED = 2
"""How often the splits of a full pool have room: rows with a common prefix name its blocks each."""

_NUM_COLUMNS = 6
"""Per row: token id, where among tokens its own stands, position, slot, stop (position + 1), place
of its table."""

_POSITION = 2
"""Which of them the position is."""


def bucket_sizes(largest: int) -> tuple[int, ...]:
    """Return batch sizes up to ``largest``, ascending: 1, 2, 4, 8, then every 8th to 64, then every
    16th."""
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, largest, 16))
    return (*(size for size in usual if size < largest), largest)


class Filled(NamedTuple):
    """A step that is ready to be launched; good until the second ``fill`` after it."""

    numbers: _HostNumbers
    size: int
    num_rows: int


class _HostNumbers:
    """Numbers of one step on the host; views of the one buffer that travels in one copy."""

    def __init__(self, sizes: tuple[int, int, int], padding: np.ndarray, *, pinned: bool) -> None:
        """sizes: of the columns together, and of what ``PagedRows`` needs of splits."""
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        columns, split_at, split_rows = self.buffer.split(sizes)
        self.columns = columns.view(_NUM_COLUMNS, -1).numpy()
        self.columns[:] = padding
        self.split_at, self.split_rows = split_at.numpy(), split_rows.numpy()
        self._counts: np.ndarray | None = None

    def write_splits(self, size: int, room: int) -> bool:
        """Write how ``size`` rows are split, by their positions; False if that are more than
        ``room``."""
        counts = self.columns[_POSITION, :size] // SPLIT_KEYS + 1
        if self._counts is not None and np.array_equal(
            counts, self._counts
        ):  # mostly: a row has another every 256 steps
            return True
        self._counts = counts
        split_at = self.split_at[: size + 1]
        counts.cumsum(out=split_at[1:])
        total = int(split_at[size])
        if total > room:
            self._counts = None
            return False
        self.split_rows[:total] = np.repeat(np.arange(size), counts)
        self.split_rows[total:room] = -1
        return True


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
        # By column, of a row that only pads: any token (the host's first), position 0, a slot of
        # the padding block, one position long, and place 0, whose table names that block.
        padding = (0, max_rows, 0, kv.num_blocks * kv.block_size, 1, 0)
        self._padding = np.array(padding, dtype=np.int64)[:, None]
        # What is filled in turn, the next one first.
        self._numbers, self._other_numbers = (
            _HostNumbers(sizes, self._padding, pinned=device.type == "cuda") for _ in range(2)
        )
        self._tokens = torch.zeros(max_rows + sum(sizes), dtype=torch.int64, device=device)
        self._device_numbers = self._tokens[max_rows:]
        columns, self._splits_on_device, self._rows_on_device = self._device_numbers.split(sizes)
        self._columns_on_device = columns.view(_NUM_COLUMNS, max_rows)
        self._firsts = torch.arange(max_rows + 1, device=device)
        self._recordings: dict[int, Work] = {}
        self.sizes: Sequence[int] = ()
        """The recorded buckets, ascending."""

    def record(self, recorder: Recorder) -> None:
        """Record all buckets, the largest first; those that memory has no room for are left out."""
        wanted = bucket_sizes(self._max_rows)
        began_at = time.perf_counter()
        for done, size in enumerate(reversed(wanted)):
            self._numbers.write_splits(size, self._room(size))  # of padding alone, as yet
            self._device_numbers.copy_(self._numbers.buffer)
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
        self.sizes = sorted(self._recordings)
        seconds = round(time.perf_counter() - began_at, 2)
        _log.info("recording done", sizes=len(self.sizes), seconds=seconds)

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor | None:
        """Run the step and return a hidden state a row, or None: see ``fill``."""
        filled = self.fill(rows)
        return None if filled is None else self.launch(filled)

    def fill(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> Filled | None:
        """Make the step ready; None: it is not one of single tokens, or larger than any bucket.

        to_come: rows whose tokens are those that ``keep`` has of the step launched last.
        Raises LocalProtocolError: see ``Forward.run``.
        """
        place = bisect_left(self.sizes, len(rows))
        if place == len(self.sizes) or any(len(row.token_ids) != 1 for row in rows):
            return None
        size = self.sizes[place]
        if not self._fill(rows, to_come, size):
            return None
        filled = Filled(self._numbers, size, len(rows))
        self._numbers, self._other_numbers = self._other_numbers, self._numbers
        return filled

    def launch(self, filled: Filled) -> torch.Tensor:
        """Queue the step; return a hidden state a row, which the next launch overwrites."""
        # The buffer is filled again for the step after the next, and not before this one's results
        # were waited for.
        self._device_numbers.copy_(filled.numbers.buffer, non_blocking=True)
        return self._recordings[filled.size]()[: filled.num_rows]

    def keep(self, token_ids: torch.Tensor) -> None:
        """Queue that these tokens, of the rows launched last, are there for those to come."""
        self._tokens[: len(token_ids)].copy_(token_ids)

    def _room(self, size: int) -> int:
        """Return for how many splits a bucket has programs; those that are not needed end at once.

        Not the most that its rows could have: that many would take longer to start than the work.
        """
        return min(size * self._splits_per_row, size + self._splits_of_pool)

    def _fill(self, rows: Sequence[StepRow], to_come: ToCome, size: int) -> bool:
        """Write the rows' numbers into the host's buffer; False if they do not fit."""
        kv, count, columns = self._kv, len(rows), self._numbers.columns
        counts = [num_blocks_needed(row, kv, self._max_model_len) for row in rows]
        token_ids, sources, positions, slots, stops, at = columns[:, :count]
        given = {id(lacking): source for lacking, source in to_come}
        token_ids[:] = [0 if id(row.token_ids) in given else row.token_ids[0] for row in rows]
        check_tokens(token_ids, self._decoder.config.vocab_size)
        sources[:] = [
            given.get(id(row.token_ids), self._max_rows + idx) for idx, row in enumerate(rows)
        ]
        places = self._tables.places([row.block_table for row in rows], counts)
        if places is None:
            return False
        at[:] = places
        positions[:] = [row.start for row in rows]
        lasts = [row.block_table[num - 1] for row, num in zip(rows, counts, strict=True)]
        slots[:] = np.array(lasts) * kv.block_size + positions % kv.block_size
        stops[:] = positions + 1
        columns[:, count:size] = self._padding
        return self._numbers.write_splits(size, self._room(size))

    def _forward(self, size: int) -> torch.Tensor:
        """Queue one step of the first ``size`` static rows."""
        _, sources, positions, slots, stops, table_at = self._columns_on_device[:, :size]
        token_ids = self._tokens[: 2 * self._max_rows].index_select(0, sources)
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
