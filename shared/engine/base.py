"""The engine's one page: what services may ask of a model, and in which words.

Three users (prefill, decode, tests) and two implementations (``torch_engine``, ``fake``) meet here.
The words of a step are ``shared/step.py``'s. Services see rows and buffers; never torch. All
methods but ``gather`` and ``scatter`` are called from one compute thread at a time. An engine keeps
no state of a request: everything a step needs is in its rows, so that recompute, preemption and
migration are nothing special.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from shared.errors import InvalidRequest
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult, StepRow, ToCome

Buffer = Any
"""An object with ``__cuda_array_interface__`` or the buffer protocol; contiguous, writable, one
byte per item."""

DEFAULT_BLOCK_SIZE = 16
DEFAULT_CPU_KV_BYTES = 1 << 30

OnLayer = Callable[[int], None]
"""Called on the compute thread after layer ``i``'s KV of the running step is written (0-based, in
order).
On CUDA the work may still be queued on the stream: ``gather`` waits for it."""


class QueuedStep(Protocol):
    """A step that a device has in its queue. Compute thread only."""

    def is_ending(self) -> bool:
        """Whether the device has little left of it: its last product, and sampling."""
        ...

    def wait_until_ending(self) -> None:
        """Wait for that."""
        ...

    def results(self) -> list[RowResult]:
        """Wait until it is done; results in row order. Raises EngineFailed: see ``Engine.step``."""
        ...


Launch = Callable[[], QueuedStep]
"""Queues a step that is ready behind the one launched last; called once, or let be. Compute thread
only. Raises EngineFailed: the device failed."""


class Engine(Protocol):
    """One model on one device with one paged KV pool.

    Blocks are 0-based; the pool holds ``num_blocks`` blocks of ``block_size`` tokens for all
    layers.
    """

    spec: ModelSpec
    layout: KvLayout
    num_blocks: int
    block_size: int

    @property
    def machine(self) -> Mapping[str, str]:
        """What computes, in words: device, kernels, threads, library. Engines that say the same
        take as long for the same model; empty: a model of an engine, whose times say nothing."""
        ...

    def pool_arrays(self) -> Sequence[np.ndarray]:
        """Return the pool as arrays of host memory, blocks ascending in each, for who makes it
        resident; empty if it lies on a device."""
        return ()

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """Run one forward pass over all rows; results in row order.

        Rows may mix prompt chunks and single tokens in any order; a row attends to its own sequence
        only.
        Raises EngineFailed: the device failed; the process should end.
        """
        ...

    def prepare(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> Launch | None:
        """Make a step ready that can be queued before the one launched last has ended, whose
        results were not read yet; None: only ``step`` runs it.

        to_come: rows that go on from that one, whose tokens stay on the device. At most two steps
        may be prepared or launched and not done.
        Raises LocalProtocolError: a row names unknown tokens or blocks.
        """
        return None

    def expect(self, grammar: str) -> Future[Any]:
        """A request under this grammar has come: make it ready beside the steps, and return what is
        done when no step waits for it any more; ``Guide.ready`` brings it back. On any thread.

        Raises InvalidRequest (code ``unsupported``): this engine holds no answer to a grammar.
        """
        raise InvalidRequest(
            "no answer can be held to a grammar here: the workers' model folder has no "
            "tokenizer.json",
            code="unsupported",
        )

    def layer_times(self) -> Sequence[float]:
        """Return when the KV of each layer of the last step was written and not merely queued, in
        ``time.monotonic``'s seconds; empty: when ``on_layer`` was called. Compute thread only, and
        for steps with ``on_layer``."""
        return ()

    def enter_thread(self) -> None:
        """Make this engine's device current on the calling thread, for a library that touches its
        buffers there (UCX needs a CUDA context on the thread that makes progress)."""

    def new_buffer(self, num_bytes: int) -> Buffer:
        """Return a staging buffer on this engine's device (pinned or huge-page host memory on
        CPU)."""
        ...

    def page_lock(self, memory: np.ndarray) -> None:
        """Let this engine's device copy to and from host memory by itself, if it can; to the end of
        the process. Nothing on a CPU."""

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        out: Buffer,
    ) -> None:
        """Copy KV of tokens [start, stop), layers [first_layer, last_layer) from the pool into
        ``out`` (wire layout, see kv/layout.py). Waits until the step that wrote these layers has
        really written them.

        Thread-safe beside ``step`` as long as no step writes those tokens.
        """
        ...

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        data: Buffer,
    ) -> None:
        """Copy a received frame (wire layout) into the pool; complete when this returns.
        Thread-safe beside
        ``step`` as long as no row of that step uses those blocks."""
        ...

    def close(self) -> None:
        """Free device memory."""
