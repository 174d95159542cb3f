"""What engines on a real device have in common, whoever computes: the streams that order copies
behind steps, and staging."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from shared.engine.base import Buffer, Engine, PreparedStep, QueuedStep
from shared.engine.device import enter_thread, new_staging, page_lock
from shared.engine.failures import DeviceFailures
from shared.engine.gpu.streams import Passing, Streams
from shared.engine.sampling.guides import Guides
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult


class PreparedOnDevice(PreparedStep):
    """A step that ``launch`` queues."""

    def __init__(self, launch: Callable[[], QueuedOnDevice]) -> None:
        self._launch = launch

    def launch(self) -> QueuedStep:
        return self._launch()


class QueuedOnDevice(QueuedStep):
    """A step in a device's queue. ending: the mark behind its layers. read: waits until all of it
    is done."""

    def __init__(self, ending: Passing, read: Callable[[], list[RowResult]]) -> None:
        self._ending, self._read = ending, read

    def is_ending(self) -> bool:
        with DeviceFailures("a step"):
            return self._ending.query()

    def wait_until_ending(self) -> None:
        with DeviceFailures("a step"):
            self._ending.synchronize()

    def results(self) -> list[RowResult]:
        with DeviceFailures("a step"):
            return self._read()


class DeviceEngine(Engine):
    """See ``base.Engine`` for the contract; a subclass computes and reaches the pool."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        streams: Streams,
        guides: Guides | None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self._streams = streams
        self._guides = guides

    def expect(self, grammar: str) -> Future[Any]:
        if self._guides is None:
            return super().expect(grammar)
        return self._guides.expect(grammar)

    def layer_times(self) -> Sequence[float]:
        return self._streams.layer_times()

    def enter_thread(self) -> None:
        enter_thread(self._device)

    def new_buffer(self, num_bytes: int) -> Buffer:
        with DeviceFailures("allocating a staging buffer"):
            return new_staging(num_bytes, self._device)

    def page_lock(self, memory: np.ndarray) -> None:
        page_lock(memory, self._device)

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        out: Buffer,
    ) -> None:
        """Copy KV out of the pool; ``out`` may be longer than the frame."""
        with (
            DeviceFailures("a gather"),
            torch.inference_mode(),
            self._streams.copying(first_layer, last_layer),
        ):
            self._copy_out(block_table, start, stop, first_layer, last_layer, out)

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        data: Buffer,
    ) -> None:
        """Copy a frame into the pool; ``data`` may be longer than the frame."""
        with (
            DeviceFailures("a scatter"),
            torch.inference_mode(),
            # No layer to wait for: nobody else writes or reads these blocks.
            self._streams.copying(0, 0),
        ):
            self._copy_in(block_table, start, stop, first_layer, last_layer, data)

    @abstractmethod
    def _copy_out(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, out: Buffer
    ) -> None: ...

    @abstractmethod
    def _copy_in(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, data: Buffer
    ) -> None: ...
