"""The forward pass in plain torch: any device, any dtype; the reference for every other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.base import OnLayer
from shared.engine.batch import flatten_rows
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
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._attention = attention
        self._streams = streams
        self._max_model_len = max_model_len
        self._device = device

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """See Forward."""
        return self._decoder.weights

    def run(
        self, rows: Sequence[StepRow], samples: Sequence[int], on_layer: OnLayer | None
    ) -> Passed:
        """See Forward."""
        batch = flatten_rows(
            rows,
            self._kv,
            vocab_size=self._decoder.config.vocab_size,
            max_model_len=self._max_model_len,
            device=self._device,
        )
        hidden = self._decoder.forward(batch, self._kv, self._attention, self._streams, on_layer)
        lasts = [0] * len(rows)
        for extent in batch.extents:
            lasts[extent.row_idx] = extent.last - 1
        wanted = hidden[:0]
        if samples:
            at = torch.tensor([lasts[idx] for idx in samples], device=self._device)
            wanted = hidden.index_select(0, at)
        return Passed(hidden, lasts, self._decoder.logits(wanted), None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward."""
        return self._decoder.logits(hidden)
