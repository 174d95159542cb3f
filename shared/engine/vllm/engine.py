"""The engine: vLLM's executor computes our step, and our copies reach where it keeps KV.

See ``base.Engine`` for the contract. One rank runs in this process, on the compute thread; several
are processes (``ranks.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shared.engine.base import Buffer, Engine, OnLayer
from shared.engine.device import enter_thread, name_of, new_staging
from shared.engine.failures import DeviceFailures
from shared.engine.paged_kv import check_blocks, check_copy, slots_of
from shared.engine.step_time import StepTimeModel, step_size
from shared.engine.streams import Streams
from shared.engine.vllm.plugins import STEP
from shared.engine.vllm.pools import Pools
from shared.engine.vllm.ranks import LayerEvents
from shared.engine.vllm.rows import FIRST_BLOCK, Rows
from shared.errors import LocalProtocolError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult, StepRow


class VllmEngine(Engine):
    """One model on one device, or on ranks of one host. Made by ``load.py``."""

    def __init__(
        self,
        core: Any,
        spec: ModelSpec,
        layout: KvLayout,
        pools: Pools,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        streams: Streams,
        facts: Mapping[str, str],
        events: LayerEvents | None = None,
        resources: contextlib.ExitStack,
    ) -> None:
        """core: vLLM's EngineCore. facts: for ``machine``. events: of ranks in other processes.
        resources: what ``close`` closes, the core first."""
        self._core = core
        self._spec = spec
        self._layout = layout
        self._pools = pools
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._device = device
        self._streams = streams
        self._facts = facts
        self._events = events
        self._resources = resources
        self._rows = Rows(block_size)
        self._step_time = StepTimeModel()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def machine(self) -> Mapping[str, str]:
        """See Engine."""
        return {"device": name_of(self._device), **self._facts}

    def pool_arrays(self) -> list[np.ndarray]:
        """See Engine."""
        return self._pools.arrays()

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """Run one pass over all rows; see ``base.Engine.step``.

        Raises LocalProtocolError, before anything ran: a row names unknown tokens or blocks.
        """
        if not rows:
            return []
        self._check(rows)
        began_at = time.perf_counter()
        plan = self._rows.plan(rows, follows_layers=on_layer is not None)
        try:
            with DeviceFailures("a step"), self._streams.computing():
                output = self._run(plan, on_layer)
                results = self._rows.results(rows, output)
        except BaseException:
            self._rows.forget()
            raise
        self._step_time.observe(*step_size(rows), time.perf_counter() - began_at)
        return results

    def _check(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            ids = row.token_ids
            if min(ids) < 0 or max(ids) >= self._spec.vocab_size:
                raise LocalProtocolError(f"a token is outside the {self._spec.vocab_size} known")
            num_blocks = -(-row.stop // self._block_size)
            # What samples nothing is followed by at least one token.
            longest = self._spec.max_model_len - int(row.sample is None)
            if len(row.block_table) < num_blocks or row.stop > longest:
                raise LocalProtocolError(f"a row of {row.stop} tokens has no room")
            check_blocks(np.asarray(row.block_table[:num_blocks]), self._num_blocks)

    def _run(self, plan: Any, on_layer: OnLayer | None) -> Any:
        executor = self._core.model_executor
        if self._events is not None and on_layer is not None:
            self._events.begin(self._rows.step, self._layout.num_layers, on_layer)
        elif on_layer is not None:
            STEP.on_layer = self._told(on_layer)
        try:
            output = executor.execute_model(plan)
            if output is None:
                output = executor.sample_tokens(None)
        finally:
            STEP.on_layer = None
        if self._events is not None and on_layer is not None:
            self._events.wait()
        return output

    def _told(self, on_layer: OnLayer) -> OnLayer:
        def written(layer: int) -> None:
            self._streams.layer_written(layer)
            on_layer(layer)

        return written

    def layer_times(self) -> Sequence[float]:
        """See Engine."""
        return self._streams.layer_times()

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        """Predict from recent steps; 0 before the first few."""
        return self._step_time.predict(*step_size(rows))

    def enter_thread(self) -> None:
        """See Engine."""
        enter_thread(self._device)

    def new_buffer(self, num_bytes: int) -> Buffer:
        """See Engine."""
        with DeviceFailures("allocating a staging buffer"):
            return new_staging(num_bytes, self._device)

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        out: Buffer,
    ) -> None:
        """Copy KV out of vLLM's pools; ``out`` may be longer than the frame."""
        check_copy(start, stop, first_layer, last_layer, self._layout)
        blocks, offsets = self._places(block_table, start, stop)
        with (
            DeviceFailures("a gather"),
            torch.inference_mode(),
            self._streams.copying(first_layer, last_layer),
        ):
            self._pools.gather(blocks, offsets, first_layer, last_layer, out)

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        data: Buffer,
    ) -> None:
        """Copy a frame into vLLM's pools; ``data`` may be longer than the frame."""
        check_copy(start, stop, first_layer, last_layer, self._layout)
        blocks, offsets = self._places(block_table, start, stop)
        with (
            DeviceFailures("a scatter"),
            torch.inference_mode(),
            # No layer to wait for: nobody else writes or reads these blocks.
            self._streams.copying(0, 0),
        ):
            self._pools.scatter(blocks, offsets, first_layer, last_layer, data)

    def _places(
        self, block_table: Sequence[int], start: int, stop: int
    ) -> tuple[np.ndarray, np.ndarray]:
        slots = slots_of(block_table, start, stop, self._block_size)
        blocks = slots // self._block_size
        check_blocks(blocks, self._num_blocks)
        return blocks + FIRST_BLOCK, slots % self._block_size

    def close(self) -> None:
        """End vLLM's executor, and its ranks."""
        self._resources.close()
