"""A model's shape without a model: a layer is a fixed matrix product, KV is random bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from shared.engine.base import OnLayer
from shared.engine.memory.paged_kv import slots_of
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult, StepRow

BLOCK_TOKENS = 16
_MATRIX = 384


class ModelledEngine:
    """Keeps what pushing needs of the ``Engine`` contract, for one prompt at a time.

    products_per_layer: matrix products that stand for one layer's compute; see ``calibrate``.
    last_layer_at: when the newest step's last layer was computed (perf_counter).
    """

    def __init__(
        self, *, num_layers: int, num_tokens: int, seed: int | None, kv_share: float = 1.0
    ) -> None:
        """seed: of the KV in the pool; None = zeros, for the end that receives. kv_share: of a
        layer's compute, what comes before its KV is written and ``on_layer`` told."""
        self._kv_share = kv_share
        self.block_size = BLOCK_TOKENS
        self.num_blocks = -(-num_tokens // BLOCK_TOKENS)
        self.layout = KvLayout(
            dtype="bfloat16", num_layers=num_layers, num_kv_heads=8, head_dim=128
        )
        self.spec = ModelSpec(
            name="modelled",
            fingerprint=bytes(32),
            vocab_size=1,
            max_model_len=1 << 20,
            eos_token_ids=frozenset(),
            dtype="bfloat16",
        )
        self._token_bytes = self.layout.token_layer_bytes // 2
        shape = (num_layers, 2, self.num_blocks * BLOCK_TOKENS, self._token_bytes)
        if seed is None:
            self._pool = np.zeros(shape, np.uint8)
        else:
            words = np.random.default_rng(seed).integers(0, 1 << 63, np.prod(shape) // 8)
            self._pool = words.view(np.uint8).reshape(shape)
        self._left = np.full((_MATRIX, _MATRIX), 0.5, np.float32)
        self._right = np.full((_MATRIX, _MATRIX), 0.25, np.float32)
        self._product = np.empty_like(self._left)
        self.products_per_layer = 1
        self.last_layer_at = 0.0

    def calibrate(self, layer_s: float) -> None:
        """Choose the work of a layer so that it takes about ``layer_s`` on this machine now."""
        took_s = min(self._timed_layer() for _ in range(20))
        self.products_per_layer = max(1, round(layer_s / took_s))

    def block_table(self) -> list[int]:
        """All blocks, in an order without neighbours."""
        return np.random.default_rng(1).permutation(self.num_blocks).tolist()

    def digest(self, table: Sequence[int], num_tokens: int) -> int:
        """xxh3 over a prompt's KV in wire layout, then forget it."""
        out = np.empty(num_tokens * self.layout.token_bytes, np.uint8)
        self.gather(table, 0, num_tokens, 0, self.layout.num_layers, out)
        return xxhash.xxh3_64_intdigest(out.data)

    def clear(self) -> None:
        self._pool[:] = 0

    # --- Engine ---

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        num_before = round(self.products_per_layer * self._kv_share)
        for layer in range(self.layout.num_layers):
            self._multiply(num_before)
            self.last_layer_at = time.perf_counter()
            if on_layer is not None:
                on_layer(layer)
            if num_before < self.products_per_layer:
                self._multiply(self.products_per_layer - num_before)
                self.last_layer_at = time.perf_counter()
        return []

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            np.dot(self._left, self._right, out=self._product)

    def layer_times(self) -> Sequence[float]:
        """Nothing is queued."""
        return ()

    def new_buffer(self, num_bytes: int) -> Any:
        return np.ones(num_bytes, np.uint8)

    def gather(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, out: Any
    ) -> None:
        slots = slots_of(table, start, stop, BLOCK_TOKENS)
        view = np.frombuffer(out, np.uint8)[: (last - first) * 2 * slots.size * self._token_bytes]
        for target, layer in zip(
            view.reshape(last - first, 2, slots.size, -1), range(first, last), strict=True
        ):
            for half in range(2):
                self._pool[layer, half].take(slots, axis=0, out=target[half], mode="clip")

    def scatter(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, data: Any
    ) -> None:
        slots = slots_of(table, start, stop, BLOCK_TOKENS)
        shape = (last - first, 2, slots.size, self._token_bytes)
        view = np.frombuffer(data, np.uint8)[: np.prod(shape)].reshape(shape)
        for source, layer in zip(view, range(first, last), strict=True):
            for half in range(2):
                self._pool[layer, half][slots] = source[half]

    def close(self) -> None:
        """Nothing to free."""

    def _timed_layer(self) -> float:
        began_at = time.perf_counter()
        np.dot(self._left, self._right, out=self._product)
        return time.perf_counter() - began_at
