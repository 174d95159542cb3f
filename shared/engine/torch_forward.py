"""The forward pass in plain torch: any device, any dtype; the reference for every other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.base import OnLayer
from shared.engine.batch import flatten_rows
from shared.engine.decode_buckets import DecodeBuckets
from shared.engine.forward import Passed
from shared.engine.models.decoder import Decoder
from shared.engine.paged_kv import PagedKv
from shared.engine.streams import Streams
from shared.step import StepRow


class TorchForward:
    """A decoder, an attention backend and the streams they run on. See ``forward.Forward``."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKv,
        *,
        attention: AttentionBackend,
        streams: Streams,
        max_model_len: int,
        device: torch.device,
        buckets: DecodeBuckets | None = None,
    ) -> None:
        """buckets: run steps of single tokens that nobody follows by layers, where they fit."""
        self._decoder = decoder
        self._kv = kv
        self._attention = attention
        self._streams = streams
        self._max_model_len = max_model_len
        self._device = device
        self._buckets = buckets

    @property
    def attention(self) -> AttentionBackend:
        """The backend, for tests and benchmarks."""
        return self._attention

    @property
    def buckets(self) -> DecodeBuckets | None:
        """Recorded decode steps, for tests and benchmarks."""
        return self._buckets

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """See Forward."""
        return self._decoder.weights

    def run(self, rows: Sequence[StepRow], on_layer: OnLayer | None) -> Passed:
        """See Forward."""
        if self._buckets is not None and on_layer is None:
            replayed = self._buckets.run(rows)
            if replayed is not None:
                return replayed
        batch = flatten_rows(
            rows,
            self._kv,
            vocab_size=self._decoder.config.vocab_size,
            max_model_len=self._max_model_len,
            device=self._device,
        )
        hidden = self._decoder.forward(batch, self._kv, self._attention, self._streams, on_layer)
        spans = [(0, 0)] * len(rows)
        for extent in batch.extents:
            spans[extent.row_idx] = (extent.first, extent.last)
        return Passed(hidden, spans)

    def logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Forward."""
        return self._decoder.logits(hidden), None
