"""An engine without a model: a KV pool in numpy in which every word says whose KV it is.

Word = request number, token, layer. It computes nothing; tests stamp what a step would have
written, and read back what arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult, StepRow

_WORD_BYTES = 8


class StampedKv:
    """A pool of ``num_blocks`` blocks; keeps the ``Engine`` contract but for ``step``."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        num_layers: int = 4,
        words: int = 4,
        fingerprint: bytes = b"f" * 32,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = KvLayout(
            dtype="uint8", num_layers=num_layers, num_kv_heads=1, head_dim=words * _WORD_BYTES
        )
        self.spec = ModelSpec(
            name="stamped",
            fingerprint=fingerprint,
            vocab_size=1000,
            max_model_len=1 << 20,
            eos_token_ids=frozenset(),
            dtype="uint8",
        )
        self._pool = np.zeros((num_layers, 2, num_blocks * block_size, words), np.uint64)

    def stamp(self, table: Sequence[int], start: int, stop: int, layer: int, request: int) -> None:
        """Write what a step would have computed for one layer of tokens [start, stop)."""
        self._pool[layer, :, self._slots(table, start, stop)] = stamps(
            request, start, stop, layer, layer + 1
        )[0, 0, :, None, None]

    def num_foreign(self, table: Sequence[int], start: int, stop: int, request: int) -> int:
        """Count the words of tokens [start, stop) that are not this request's own."""
        words = self._pool[:, :, self._slots(table, start, stop)]
        own = stamps(request, start, stop, 0, self.layout.num_layers)[..., None]
        return int((words != own).sum())

    def new_buffer(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def gather(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, out: Any
    ) -> None:
        words = self._pool[first:last, :, self._slots(table, start, stop)]
        np.frombuffer(out, np.uint64)[: words.size] = words.reshape(-1)

    def scatter(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, data: Any
    ) -> None:
        slots = self._slots(table, start, stop)
        shape = (last - first, 2, stop - start, self._pool.shape[3])
        words = np.frombuffer(data, np.uint64)[: int(np.prod(shape))].reshape(shape)
        self._pool[first:last, :, slots] = words

    def step(self, rows: Sequence[StepRow], on_layer: Any = None) -> list[RowResult]:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _slots(self, table: Sequence[int], start: int, stop: int) -> np.ndarray:
        tokens = np.arange(start, stop)
        blocks = np.asarray(table)[tokens // self.block_size]
        return blocks * self.block_size + tokens % self.block_size


def stamps(request: int, start: int, stop: int, first: int, last: int) -> np.ndarray:
    """Words of shape [layers, 1, tokens]."""
    tokens = np.arange(start, stop, dtype=np.uint64)
    layers = np.arange(first, last, dtype=np.uint64)[:, None, None]
    return (np.uint64(request + 1) << np.uint64(32)) | (tokens << np.uint64(8)) | layers


class Blocks:
    """Which blocks are free; the last ones given back go out first, so that reuse is quick."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))

    def take(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self.free):
            return None
        return [self.free.pop() for _ in range(num_blocks)]

    def give_back(self, blocks: Sequence[int]) -> None:
        assert not set(blocks) & set(self.free), "a block came home twice"
        self.free.extend(reversed(blocks))

    @property
    def is_full(self) -> bool:
        return sorted(self.free) == list(range(self.num_blocks))
