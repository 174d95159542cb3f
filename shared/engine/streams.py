"""How a copy waits for the layer it copies: CUDA streams and events, or nothing on CPU.

On CUDA a step only queues work. ``layer_written`` marks a point in that queue, and a copy of that
layer, made on a stream of its own by another thread, waits for the mark. On CPU torch returns when
the work is done, so every call here is empty; the engine's code is the same for both.

Steps without ``on_layer`` may leave no marks (replayed ones do not, see ``decode_buckets.py``).
That is safe: nobody copies KV of a running step but who was told of its layers by ``on_layer``, and
once ``computing`` is left everything the step queued is done, so a later copy needs no mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Streams(Protocol):
    """The order between a running step and copies beside it."""

    def computing(self) -> AbstractContextManager[None]:
        """Hold while a step is queued and its results are read."""
        ...

    def layer_written(self, layer: int) -> None:
        """Mark that the KV of a layer of the running step is queued; compute thread only."""
        ...

    def copying(self, first_layer: int, last_layer: int) -> AbstractContextManager[None]:
        """Hold while layers [first_layer, last_layer) are copied.

        Work inside starts after the latest marks of these layers; leaving waits until it is done.
        """
        ...


_NOTHING = nullcontext()


class InlineStreams:
    """CPU: everything is done when the call returns."""

    def computing(self) -> AbstractContextManager[None]:
        return _NOTHING

    def layer_written(self, layer: int) -> None:
        pass

    def copying(self, first_layer: int, last_layer: int) -> AbstractContextManager[None]:
        return _NOTHING


class CudaStreams:
    """One stream for steps, one for copies, one event per layer.

    A step that re-records an event makes a waiting copy wait longer, never shorter: the marks of
    one stream are ordered. So one event per layer is enough.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._written = [torch.cuda.Event() for _ in range(num_layers)]
        # Weights and pools were filled on the default stream; our streams do not wait for it.
        torch.cuda.synchronize(device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            yield
            self._compute.synchronize()

    def layer_written(self, layer: int) -> None:
        self._written[layer].record(self._compute)

    @contextmanager
    def copying(self, first_layer: int, last_layer: int) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._copy):
            for layer in range(first_layer, last_layer):
                self._copy.wait_event(self._written[layer])
            yield
            self._copy.synchronize()
