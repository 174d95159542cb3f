"""The engine that runs real models: a Hugging Face folder, torch, CPU or CUDA.

Puts the parts together (folder, weights, decoder, pool, sampler) and keeps to the contract of
``base.py``. The one place where torch's exceptions become EngineFailed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
import torch

from shared.engine.attention.base import AttentionBackend
from shared.engine.attention.sdpa import SdpaAttention
from shared.engine.attention.triton import TritonAttention
from shared.engine.base import DEFAULT_BLOCK_SIZE, DEFAULT_CPU_KV_BYTES, Launch, OnLayer, QueuedStep
from shared.engine.computing import choose, keep_precision
from shared.engine.device import current, name_of, require_shareable_memory, resolve_device
from shared.engine.device_engine import DeviceEngine
from shared.engine.failures import DeviceFailures
from shared.engine.forward import Forward, Passed
from shared.engine.gpu.decode_buckets import DecodeBuckets
from shared.engine.gpu.device_memory import MemoryNeeds, kv_bytes_of, measure
from shared.engine.gpu.recording import CudaRecorder, Recorder
from shared.engine.gpu.streams import CudaStreams, Streams
from shared.engine.memory.paged_kv import TORCH_DTYPES, PagedKv
from shared.engine.memory.resident import available_bytes
from shared.engine.models.decoder import load_decoder, with_own_head
from shared.engine.models.layers import LayerOps
from shared.engine.models.registry import read_model_config
from shared.engine.models.weights import Checkpoint
from shared.engine.native.build import NATIVE, OWN_BITS
from shared.engine.native.forward import NativeForward
from shared.engine.sampling import sampler
from shared.engine.sampling.guides import Guides, Masks
from shared.engine.torch_forward import TorchForward
from shared.errors import LocalProtocolError, ModelError
from shared.model_folder import ModelFolder
from shared.model_spec import ModelSpec
from shared.request import TokenLogprobs
from shared.step import RowResult, SampleSpec, StepRow, ToCome

_log = structlog.get_logger(__name__)

_LOGIT_ROWS = 64
"""Positions whose prompt logprobs are computed at once: bounds ``[rows, vocab_size]`` float32."""

_WEIGHTS_REMEDY = (
    "the weights are larger than what is free: choose another --device, or end what else is there"
)


class _StepOutputs(NamedTuple):
    """What a step's rows want besides KV.

    Looked at before the kernels, for they drive the rows out of the caches (bench/engine).

    samples: the rows that sample; specs: theirs. prompts: rows that want prompt logprobs, with
    their places.
    """

    num_rows: int
    samples: list[int]
    specs: list[SampleSpec]
    is_plain_greedy: bool
    prompts: list[tuple[int, StepRow]]

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> _StepOutputs:
        samples: list[int] = []
        specs: list[SampleSpec] = []
        prompts: list[tuple[int, StepRow]] = []
        for idx, row in enumerate(rows):
            if row.sample is not None:
                samples.append(idx)
                specs.append(row.sample)
            if row.prompt_logprobs is not None and row.prompt_targets:
                prompts.append((idx, row))
        is_plain_greedy = all(map(sampler.is_plain_greedy, specs))
        return cls(len(rows), samples, specs, is_plain_greedy, prompts)


class TorchEngine(DeviceEngine):
    """One model on one device. See ``base.Engine`` for the contract."""

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        kv: PagedKv,
        *,
        streams: Streams,
        device: torch.device,
        kernels: str = "torch",
        guides: Guides | None = None,
    ) -> None:
        super().__init__(
            *(spec, kv.layout, kv.num_blocks, kv.block_size, kv.copies),
            device=device,
            streams=streams,
            guides=guides,
        )
        self.forward = forward
        self._kv = kv
        self._kernels = kernels

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        num_blocks: int | None = None,
        kv_bytes: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        kernels: str = "auto",
        max_graph_rows: int = 0,
        memory_needs: MemoryNeeds | None = None,
        exact: bool = False,
        name: str | None = None,
    ) -> TorchEngine:
        """Load a model folder and allocate its KV pool.

        device: see ``resolve_device``. dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto``:
        what the folder says, but float32 instead of 16 bits where torch would compute them on a
        CPU; weights, activations and KV all use it. num_blocks or kv_bytes: size of the pool;
        neither = 1 GiB on CPU, on CUDA what ``memory_needs`` (its defaults, if None) leave.
        num_threads: torch's, for the whole process. exact: no answer depends on its batch or
        chunks, or there is no engine (see ``choose``). kernels: ``native`` (native/; or by
        the instructions that are named, see ``build``), ``triton`` (attention/triton.py,
        triton_layers.py), ``torch``, or ``auto``: native or triton where they run. max_graph_rows:
        record decode steps of up to so many rows and replay them (decode_buckets.py) where the
        kernels allow it; 0 = none.
        Raises ModelError: the folder is missing, unsupported or damaged, or an argument does not
        fit it. Raises EngineFailed: the device is missing or too small.
        """
        with DeviceFailures("finding the device"):
            place = resolve_device(device)
        if place.type == "cuda":
            require_shareable_memory(os.environ)
        files = ModelFolder(folder)
        config = read_model_config(files)
        checkpoint = Checkpoint(files)
        config = with_own_head(config, checkpoint)
        length = _choose_len(max_model_len, config.max_position_embeddings, config.longest_len)
        if block_size < 1:
            raise ModelError(f"block_size must be at least 1, not {block_size}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        keep_precision()
        with DeviceFailures("choosing kernels"), current(place):
            layout, chosen = choose(
                dtype, kernels, config, checkpoint, block_size, place, exact=exact
            )
        served = layout.dtype
        eos = files.eos_token_ids
        spec = ModelSpec(
            name=name or files.name,
            fingerprint=checkpoint.digest(
                *(config.canonical(), served, repr(sorted(eos))), vocab_size=config.vocab_size
            ),
            vocab_size=config.vocab_size,
            max_model_len=length,
            eos_token_ids=eos,
            dtype=served,
        )
        guides = Guides.of(files, spec.vocab_size, eos)
        block_bytes = layout.token_bytes * block_size
        if place.type == "cpu":
            _require_memory(block_bytes * num_blocks if num_blocks else kv_bytes or 0)
        with DeviceFailures("making the KV pool"), torch.inference_mode(), current(place):
            streams = Streams()
            if chosen in NATIVE:
                count = _choose_blocks(num_blocks, kv_bytes, block_bytes)
                kv = PagedKv(layout, count, block_size, place)
                asked = "" if chosen == "native" else chosen
                forward = NativeForward(
                    config, checkpoint, kv, max_model_len=length, instructions=asked
                )
                said = f"native, {forward.instructions}"
                if forward.instructions in OWN_BITS:
                    spec = replace(spec, engine=f"{spec.engine} {forward.instructions}")
                return cls(
                    forward, spec, kv, streams=streams, device=place, kernels=said, guides=guides
                )
            attention: AttentionBackend = SdpaAttention()
            ops = LayerOps()
            if chosen == "triton":
                from shared.engine.gpu.triton_layers import ops_for

                attention = TritonAttention(layout, config.num_heads, is_exact=exact)
                ops = ops_for(is_exact=exact)
            # Weights first: on a GPU the pool takes what they leave.
            with DeviceFailures("loading the weights", _WEIGHTS_REMEDY):
                decoder = load_decoder(
                    config, checkpoint, dtype=TORCH_DTYPES[served], device=place, ops=ops
                )
            if place.type == "cuda":
                streams = CudaStreams(config.num_layers, place)

            def over(kv: PagedKv, buckets: DecodeBuckets | None = None) -> TorchEngine:
                forward = TorchForward(
                    decoder,
                    kv,
                    attention=attention,
                    streams=streams,
                    max_model_len=length,
                    device=place,
                    buckets=buckets,
                )
                return cls(
                    forward, spec, kv, streams=streams, device=place, kernels=chosen, guides=guides
                )

            graph_rows = max_graph_rows if attention.has_static_plans else 0
            num_padding = int(graph_rows > 0)
            if place.type == "cuda" and num_blocks is None and kv_bytes is None:
                needs = memory_needs or MemoryNeeds()
                memory = measure(
                    over(PagedKv(layout, 1, block_size, place)).step,
                    needs,
                    max_model_len=length,
                    block_size=block_size,
                    graph_rows=graph_rows,
                    device=place,
                )
                least = (1 + num_padding) * block_bytes
                kv_bytes = kv_bytes_of(memory, needs.share, least=least)
            count = _choose_blocks(num_blocks, kv_bytes, block_bytes, num_padding)
            # On the steps' own stream, which does not wait for the default one: there the pool's
            # zeros might come after a step's KV.
            with streams.computing():
                kv = PagedKv(layout, count, block_size, place, num_padding=num_padding)
                if not graph_rows:
                    return over(kv)
                buckets = DecodeBuckets(
                    decoder,
                    kv,
                    attention,
                    max_rows=graph_rows,
                    max_model_len=length,
                    device=place,
                )
                buckets.record(CudaRecorder() if place.type == "cuda" else Recorder())
                return over(kv, buckets)

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """Run one pass over all rows; see ``base.Engine.step``.

        Raises LocalProtocolError, before anything ran: a row names unknown tokens or blocks.
        """
        if not rows:
            return []
        wanted = _StepOutputs.of(rows)
        guided = self._guides.begin(rows) if self._guides is not None else None
        with DeviceFailures("a step"), self._streams.computing():
            passed = self.forward.run(rows, wanted.samples, on_layer)
            return self._results(wanted, passed, None if guided is None else guided.result())

    def prepare(self, rows: Sequence[StepRow], to_come: ToCome = ()) -> Launch | None:
        """See Engine: replayed steps whose tokens are chosen without the host."""
        specs: list[SampleSpec] = []
        for row in rows:
            if row.sample is None or row.prompt_targets or not sampler.needs_no_host(row.sample):
                return None
            specs.append(row.sample)
        with DeviceFailures("a step"), torch.inference_mode(), self._streams.queueing():
            queue = self.forward.prepare(rows, to_come)
        if queue is None:
            return None
        choose = partial(sampler.choose, specs=specs, eos_token_ids=self.spec.eos_token_ids)

        def launch() -> QueuedStep:
            with DeviceFailures("a step"), torch.inference_mode(), self._streams.queueing():
                return queue(choose)

        return launch

    @property
    def machine(self) -> Mapping[str, str]:
        return {
            "device": name_of(self._device),
            "kernels": self._kernels,
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
        }

    def pool_arrays(self) -> list[np.ndarray]:
        return self._kv.arrays()

    def close(self) -> None:
        """Give the pool and the weights back; the engine is unusable afterwards."""
        if self._guides is not None:
            self._guides.close()
        for name in ("_kv", "_copies", "forward"):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _results(
        self, wanted: _StepOutputs, passed: Passed, masks: Masks | None
    ) -> list[RowResult]:
        if passed.best is not None and wanted.is_plain_greedy:
            if masks is not None:
                passed.deny(masks)
            sampled = [RowResult(token_id) for token_id in passed.best()]
        else:
            eos = self.spec.eos_token_ids
            guide = None if masks is None else partial(passed.deny, masks)
            with torch.inference_mode():
                sampled = sampler.sample(
                    passed.logits(), wanted.specs, eos_token_ids=eos, guide=guide
                )
        for place, reason in masks.failures.items() if masks is not None else ():
            sampled[place] = sampled[place]._replace(failure=reason)
        results = sampled
        if len(sampled) < wanted.num_rows:
            results = [RowResult(-1)] * wanted.num_rows
            for idx, result in zip(wanted.samples, sampled, strict=True):
                results[idx] = result
        for idx, row in wanted.prompts:
            assert row.prompt_logprobs is not None
            stop = passed.lasts[idx] + 1
            part = passed.hidden()[stop - len(row.token_ids) : stop]
            entries = self._prompt_logprobs(part, row.prompt_targets, row.prompt_logprobs)
            results[idx] = results[idx]._replace(prompt_logprobs=entries)
        return results

    def _prompt_logprobs(
        self, hidden: torch.Tensor, targets: Sequence[int], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        if len(targets) > hidden.shape[0]:
            raise LocalProtocolError(
                f"{len(targets)} prompt targets for a chunk of {hidden.shape[0]} tokens"
            )
        entries: list[TokenLogprobs] = []
        with torch.inference_mode():
            for begin in range(0, len(targets), _LOGIT_ROWS):
                part = targets[begin : begin + _LOGIT_ROWS]
                logits = self.forward.logits(hidden[begin : begin + len(part)])
                entries += sampler.logprobs_of(logits, part, num_top)
        return tuple(entries)


def _choose_len(asked: int | None, default: int, longest: int) -> int:
    length = default if asked is None else asked
    if not 2 <= length <= longest:  # a prompt and an answer of one token
        raise ModelError(f"max_model_len {length} is not within this model's 2 to {longest}")
    return length


def _require_memory(pool_bytes: int) -> None:
    """Raise ModelError if a pool that was asked for is larger than what we may still take: the
    kernel would end this process once it is used. The usual pool is small, and may do."""
    available = available_bytes()
    if available is not None and pool_bytes > available:
        raise ModelError(
            f"a KV pool of {pool_bytes / 2**30:.1f} GiB (--kv-gib, --num-blocks) is more than the "
            f"{available / 2**30:.1f} GiB of memory that this process may still take"
        )


def _choose_blocks(
    num_blocks: int | None, kv_bytes: int | None, block_bytes: int, num_padding: int = 0
) -> int:
    """Return how many blocks rows may use; ``num_padding`` more are to fit into the memory."""
    if num_blocks is None:
        num_blocks = (kv_bytes or DEFAULT_CPU_KV_BYTES) // block_bytes - num_padding
    if num_blocks < 1:
        raise ModelError(f"the KV pool has no room for one block of {block_bytes} bytes")
    return num_blocks
