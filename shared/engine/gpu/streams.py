"""How a copy waits for the layer it copies: CUDA streams and events, or nothing on CPU.

On CUDA a step only queues work. ``layer_written`` marks a point in that queue, and a copy of that
layer, made on a stream of its own by another thread, waits for the mark. On CPU torch returns when
the work is done, so every call here is empty; the engine's code is the same for both.

Steps without ``on_layer`` may leave no marks (replayed ones do not, see ``decode_buckets.py``).
That is safe: nobody copies KV of a running step but who was told of its layers by ``on_layer``, and
once ``computing`` is left, or the results of a queued step are read, everything the step queued is
done, so a later copy needs no mark.

A mark is set when work is queued; when it was done only the device knows. It is asked once a step,
after that was waited for anyway (``layer_times``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

_NOTHING = nullcontext()


class Passing(Protocol):
    """A point in a stream's queue that the host may wait for: ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED = _Passed()


class Streams:
    """The order between a running step and copies beside it. This one is a CPU's, where everything
    is done when the call returns."""

    def computing(self) -> AbstractContextManager[None]:
        """Hold while a step is queued and its results are read."""
        return _NOTHING

    def queueing(self) -> AbstractContextManager[None]:
        """Hold while a step is queued whose results are read later, behind a ``mark``."""
        return _NOTHING

    def mark(self) -> Passing:
        """Mark this point in the queue; inside ``computing`` or ``queueing``."""
        return _PASSED

    def layer_written(self, layer: int) -> None:
        """Mark that the KV of a layer of the running step is queued; compute thread only."""

    def layer_times(self) -> Sequence[float]:
        """Return when the device had written each layer of the last step, in ``time.monotonic``'s
        seconds; empty: when ``layer_written`` was called, or a replayed step has left no marks.

        Compute thread only, after ``computing`` was left.
        """
        return ()

    def copying(self, first_layer: int, last_layer: int) -> AbstractContextManager[None]:
        """Hold while layers [first_layer, last_layer) are copied.

        Work inside starts after the latest marks of these layers; leaving waits until it is done.
        """
        return _NOTHING


class StepMarks:
    """The marks of one step after the other: its beginning, queued to an idle stream, and each
    layer's KV. new_mark: makes what ``torch.cuda.Event(enable_timing=True)`` is."""

    def __init__(
        self,
        num_layers: int,
        new_mark: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layers = [new_mark() for _ in range(num_layers)]
        self._beginning = new_mark()
        self._clock = clock
        self._begun_at = self._ended_at = 0.0
        self._num_written = 0

    def begin(self, stream: Any) -> None:
        """A step is about to be queued; nothing of an earlier one is left in the stream."""
        self._begun_at, self._num_written = self._clock(), 0
        self._beginning.record(stream)

    def layer_written(self, layer: int, stream: Any) -> None:
        """The KV of a layer is queued."""
        self.layers[layer].record(stream)
        self._num_written = layer + 1

    def end(self) -> None:
        """The host has waited for the whole step."""
        self._ended_at = self._clock()

    def times(self) -> tuple[float, ...]:
        """Return when the device had written each layer of the step that ended last, by the host's
        clock: nothing was done after its end, whatever two clocks make of it."""
        layers = self.layers[: self._num_written]
        elapsed_ms = [self._beginning.elapsed_time(mark) for mark in layers]
        return tuple(min(self._begun_at + it / 1e3, self._ended_at) for it in elapsed_ms)


class CudaStreams(Streams):
    """One stream for steps, one for copies, one event per layer.

    A step that re-records an event makes a waiting copy wait longer, never shorter: the marks of
    one stream are ordered. So one event per layer is enough.
    """

    def __init__(
        self, num_layers: int, device: torch.device, compute: torch.cuda.Stream | None = None
    ) -> None:
        """compute: the stream for steps, if whoever computes insists on one."""
        self._device = device
        self._compute = compute or torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._marks = StepMarks(num_layers, lambda: torch.cuda.Event(enable_timing=True))
        # Weights and pools were filled on the default stream; our streams do not wait for it.
        torch.cuda.synchronize(device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            self._marks.begin(self._compute)
            yield
            self._compute.synchronize()
            self._marks.end()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            yield

    def mark(self) -> Passing:
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def layer_written(self, layer: int) -> None:
        self._marks.layer_written(layer, self._compute)

    def layer_times(self) -> Sequence[float]:
        return self._marks.times()

    @contextmanager
    def copying(self, first_layer: int, last_layer: int) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._copy):
            for layer in range(first_layer, last_layer):
                self._copy.wait_event(self._marks.layers[layer])
            yield
            self._copy.synchronize()
