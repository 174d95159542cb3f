"""What engines on a real device have in common, whoever computes: the streams that order copies
behind steps, and staging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from shared.engine.base import Buffer, Engine, QueuedStep
from shared.engine.device import page_lock
from shared.engine.failures import DeviceFailures
from shared.engine.gpu.streams import Passing, Streams
from shared.engine.memory.kv_copies import KvCopies
from shared.engine.memory.paged_kv import check_blocks, slots_of
from shared.engine.sampling.guides import Guides
from shared.errors import LocalProtocolError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult


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
    """See ``base.Engine`` for the contract; a subclass computes."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        copies: KvCopies,
        *,
        device: torch.device,
        streams: Streams,
        guides: Guides | None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._copies = copies
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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # Neither that nor an allocation is sure to call CUDA on a new thread: torch knows the
            # device, and has memory left. This does, and so makes the context current here.
            torch.cuda.synchronize(self._device)

    def new_buffer(self, num_bytes: int) -> Buffer:
        """A CUDA uint8 tensor, or a numpy array."""
        with DeviceFailures("allocating a staging buffer"):
            if self._device.type == "cuda":
                slab = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
                # The zeros must not overtake a copy; a step that runs need not be waited for.
                torch.cuda.current_stream(self._device).synchronize()
                return slab
            # numpy asks for huge pages for large arrays; writing zeros maps them now, so that no
            # transfer pays for page faults.
            buffer = np.empty(num_bytes, dtype=np.uint8)
            buffer.fill(0)
            return buffer

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
        slots = self._slots(block_table, start, stop, first_layer, last_layer)
        with (
            DeviceFailures("a gather"),
            torch.inference_mode(),
            self._streams.copying(first_layer, last_layer),
        ):
            self._copies.gather(slots, first_layer, last_layer, out)

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
        slots = self._slots(block_table, start, stop, first_layer, last_layer)
        with (
            DeviceFailures("a scatter"),
            torch.inference_mode(),
            # No layer to wait for: nobody else writes or reads these blocks.
            self._streams.copying(0, 0),
        ):
            self._copies.scatter(slots, first_layer, last_layer, data)

    def _slots(
        self, block_table: Sequence[int], start: int, stop: int, first_layer: int, last_layer: int
    ) -> np.ndarray:
        """Of what is to be copied. Raises LocalProtocolError: the pool has no such thing."""
        if not 0 <= start < stop:
            raise LocalProtocolError(f"[{start}, {stop}) is no range of positions")
        if not 0 <= first_layer < last_layer <= self.layout.num_layers:
            raise LocalProtocolError(f"[{first_layer}, {last_layer}) is no range of layers")
        slots = slots_of(block_table, start, stop, self.block_size)
        check_blocks(slots // self.block_size, self.num_blocks)
        return slots
