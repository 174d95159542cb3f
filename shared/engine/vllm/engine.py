"""The engine: vLLM's executor computes our step, and our copies reach where it keeps KV.

See ``base.Engine`` for the contract. One rank runs in this process, on the compute thread; several
are processes (``ranks.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from shared.engine.base import Launch, OnLayer
from shared.engine.device import name_of
from shared.engine.device_engine import DeviceEngine, QueuedOnDevice
from shared.engine.failures import DeviceFailures
from shared.engine.gpu.streams import Streams
from shared.engine.memory.paged_kv import check_blocks
from shared.engine.sampling import sampler
from shared.engine.sampling.guides import Guides
from shared.engine.vllm.plugins import STEP
from shared.engine.vllm.pools import Pools
from shared.engine.vllm.ranks import LayerEvents
from shared.engine.vllm.rows import FIRST_BLOCK, PlannedStep, Rows
from shared.errors import EngineFailed, LocalProtocolError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.step import RowResult, StepRow, ToCome


class VllmEngine(DeviceEngine):
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
        guides: Guides | None,
        facts: Mapping[str, str],
        events: LayerEvents | None = None,
        queues: bool = False,
        resources: contextlib.ExitStack,
    ) -> None:
        """core: vLLM's EngineCore. facts: for ``machine``. events: of ranks in other processes.
        queues: sampled tokens stay on the device, and steps may be queued behind each other.
        resources: what ``close`` closes, the core first."""
        super().__init__(
            *(spec, layout, num_blocks, block_size, pools),
            device=device,
            streams=streams,
            guides=guides,
        )
        self._core = core
        self._pools = pools
        self._facts = facts
        self._events = events
        self._queues = queues
        self._resources = resources
        self._rows = Rows(block_size)

    @property
    def machine(self) -> Mapping[str, str]:
        return {"device": name_of(self._device), **self._facts}

    def pool_arrays(self) -> list[np.ndarray]:
        return self._pools.arrays()

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """Run one pass over all rows; see ``base.Engine.step``.

        Raises LocalProtocolError, before anything ran: a row names unknown tokens or blocks.
        """
        if not rows:
            return []
        self._check(rows)
        guided = self._guides.begin(rows) if self._guides is not None else None
        masks = guided
        if guided is not None and self._events is not None:
            # Ranks are other processes, and nothing reaches them once their step has begun.
            masks = guided.result()
        step = self._rows.plan(rows, masks, follows_layers=on_layer is not None)
        try:
            with DeviceFailures("a step"), self._streams.computing():
                output = self._run(step, on_layer)
                results = self._rows.results(rows, step, output)
        except TimeoutError as error:
            # vLLM's word for a silent rank. As it is it would pass for a deadline of ours: the
            # worker would stay, and its answers wait for ever.
            raise EngineFailed(
                "a rank of this worker is silent for longer than a step may take (300 s, or "
                "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), and with it ends the worker"
            ) from error
        except BaseException:
            self._rows.forget()
            raise
        for idx, mask in guided.result().by_row(rows).items() if guided is not None else ():
            results[idx] = results[idx]._replace(failure=mask.failure)
        return results

    def prepare(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> Launch | None:
        """See Engine: steps of single tokens, chosen without the host, over the runner that leaves
        them on the device."""
        if not self._queues:
            return None
        for row in rows:
            if row.sample is None or not sampler.needs_no_host(row.sample):
                return None
            if len(row.token_ids) > 1 or row.prompt_targets:
                return None
        self._check(rows, to_come)
        if not self._rows.follow(rows, to_come):
            return None
        return partial(self._launch, rows, to_come)

    def _launch(self, rows: Sequence[StepRow], to_come: ToCome) -> QueuedOnDevice:
        step = self._rows.plan(rows, to_come=to_come)
        executor = self._core.model_executor
        try:
            with DeviceFailures("a step"), self._streams.queueing():
                executor.execute_model(step.order)
                ending = self._streams.mark()
                output = executor.sample_tokens(None, non_block=True)
        except BaseException:
            self._rows.forget()
            raise
        return QueuedOnDevice(ending, lambda: self._rows.results(rows, step, output.result()))

    def _check(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> None:
        lacking = {id(token_ids) for token_ids, _ in to_come}
        for row in rows:
            ids = (0,) if id(row.token_ids) in lacking else row.token_ids
            if min(ids) < 0 or max(ids) >= self.spec.vocab_size:
                raise LocalProtocolError(f"a token is outside the {self.spec.vocab_size} known")
            num_blocks = -(-row.stop // self.block_size)
            # What samples nothing is followed by at least one token.
            longest = self.spec.max_model_len - int(row.sample is None)
            if len(row.block_table) < num_blocks or row.stop > longest:
                raise LocalProtocolError(f"a row of {row.stop} tokens has no room")
            check_blocks(np.asarray(row.block_table[:num_blocks]), self.num_blocks)

    def _run(self, step: PlannedStep, on_layer: OnLayer | None) -> Any:
        executor = self._core.model_executor
        if self._events is not None and on_layer is not None:
            self._events.begin(step.number, self.layout.num_layers, on_layer)
        elif on_layer is not None:
            STEP.on_layer = self._told(on_layer)
        try:
            output = executor.execute_model(step.order)
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

    def _slots(
        self, block_table: Sequence[int], start: int, stop: int, first_layer: int, last_layer: int
    ) -> np.ndarray:
        slots = super()._slots(block_table, start, stop, first_layer, last_layer)
        return slots + FIRST_BLOCK * self.block_size

    def close(self) -> None:
        """End vLLM's executor, and its ranks."""
        if self._guides is not None:
            self._guides.close()
        self._resources.close()
