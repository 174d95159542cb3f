"""The forward pass in plain torch: any device, any dtype; the reference for every other way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.base import OnLayer
from shared.engine.batch import flatten_rows
from shared.engine.device_engine import QueuedOnDevice
from shared.engine.forward import Choose, Passed
from shared.engine.gpu.decode_buckets import DecodeBuckets
from shared.engine.gpu.streams import Streams
from shared.engine.gpu.upload import to_device, to_host
from shared.engine.memory.paged_kv import PagedKv
from shared.engine.models.decoder import Decoder
from shared.engine.sampling.sampler import deny
from shared.step import RowResult, StepRow, ToCome


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
        self.attention = attention
        self._streams = streams
        self._max_model_len = max_model_len
        self._device = device
        self.buckets = buckets

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        return self._decoder.weights

    @torch.inference_mode()
    def run(
        self, rows: Sequence[StepRow], samples: Sequence[int], on_layer: OnLayer | None
    ) -> Passed:
        hidden, lasts = self._hidden(rows, on_layer)
        if not samples:
            # No product and no kernel of nothing: not every launcher takes an empty grid.
            nothing = hidden.new_empty((0, self._decoder.config.vocab_size), dtype=torch.float32)
            return Passed(lambda: hidden, lasts, lambda: nothing, partial(deny, nothing), None)
        wanted = hidden
        places = [lasts[idx] for idx in samples]
        if places != list(range(len(hidden))):
            wanted = hidden.index_select(0, to_device(np.array(places), self._device))
        logits = self._decoder.logits(wanted)
        return Passed(lambda: hidden, lasts, lambda: logits, partial(deny, logits), None)

    def prepare(
        self, rows: Sequence[StepRow], to_come: ToCome
    ) -> Callable[[Choose], QueuedOnDevice] | None:
        buckets = self.buckets
        filled = None if buckets is None else buckets.fill(rows, to_come)
        if buckets is None or filled is None:
            return None

        def queue(choose: Choose) -> QueuedOnDevice:
            hidden = buckets.launch(filled)
            ending = self._streams.mark()
            token_ids = choose(self._decoder.logits(hidden))
            buckets.keep(token_ids)
            on_host = to_host(token_ids)
            done = self._streams.mark()

            def read() -> list[RowResult]:
                done.synchronize()
                return [RowResult(token_id) for token_id in on_host.tolist()]

            return QueuedOnDevice(ending, read)

        return queue

    def _hidden(
        self, rows: Sequence[StepRow], on_layer: OnLayer | None
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Hidden states of all tokens, and where in them each row's last token lies."""
        if self.buckets is not None and on_layer is None:
            replayed = self.buckets.run(rows)
            if replayed is not None:
                return replayed, range(len(rows))
        batch = flatten_rows(
            rows,
            self._kv,
            vocab_size=self._decoder.config.vocab_size,
            max_model_len=self._max_model_len,
            device=self._device,
        )
        hidden = self._decoder.forward(batch, self._kv, self.attention, self._streams, on_layer)
        lasts = [0] * len(rows)
        for extent in batch.extents:
            lasts[extent.row_idx] = extent.last - 1
        return hidden, lasts

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)
