"""What vLLM calls while it computes a step that we planned: what stands for its scheduler, a
connector that hears of every layer, and our sampler as a logits processor.

vLLM makes these objects itself, by name; in tensor parallel it does so in the processes of its
ranks. So what they share is ``STEP``, one a process.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from shared.engine.base import OnLayer
from shared.engine.gpu.upload import to_device
from shared.engine.sampling import sampler
from shared.engine.sampling.guides import Masks
from shared.engine.vllm import whole_weights
from shared.engine.vllm.ranks import RankEnd
from shared.step import SampleSpec

ROW = "row"
"""Key of a row's name in vLLM's sampling parameters."""

RANKS = "ranks"
"""Key of the folder where ranks meet in the connector's configuration; '' = one rank, here."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the rows of a step want besides their most likely token, by row name.

    specs: choose by our sampler. forced: take this token, so that vLLM tells its logprob. guided:
    those of ``specs`` that follow a grammar, and masks: what each of them may choose, or will have
    been found to when there are logits.
    """

    specs: Mapping[str, SampleSpec] = field(default_factory=dict[str, SampleSpec])
    forced: Mapping[str, int] = field(default_factory=dict[str, int])
    guided: Sequence[str] = ()
    masks: Future[Masks] | Masks | None = None

    def masks_of(self, names: Sequence[str]) -> Masks | None:
        """Return what these rows may choose, in their order."""
        if self.masks is None:
            return None
        found = self.masks.result() if isinstance(self.masks, Future) else self.masks
        lines = {name: line for line, name in enumerate(self.guided)}
        places = [place for place, name in enumerate(names) if name in lines]
        return Masks(places, found.bits[[lines[names[place]] for place in places]], {})


class StepMeta(KVConnectorMetadata):
    """Travels with a step to every rank. step: counts up. follows_layers: somebody wants to hear
    of each layer."""

    def __init__(self, step: int, choices: Choices, *, follows_layers: bool) -> None:
        self.step = step
        self.choices = choices
        self.follows_layers = follows_layers


@dataclass(slots=True)
class _SharedStep:
    """What the plug-ins of this process share.

    has_engine: of the worker's process, also where its ranks are others. pools: KV by layer.
    on_layer: where events go that are not another process's to hear.
    """

    has_engine: bool = False
    pools: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    on_layer: OnLayer | None = None
    choices: Choices = field(default_factory=Choices)
    eos_token_ids: frozenset[int] = frozenset()


STEP = _SharedStep()


def _no_counts(logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logprobs.shape[0], dtype=torch.long, device=logprobs.device)


whole_weights.take_over()

# vLLM's kernels take for granted that Linux was asked for AMX's registers, which oneDNN does with
# its first large product: of a small model the process would end in them.
torch.cpu._init_amx()

# How many tokens are likelier than the chosen one: nobody here asks, and vLLM compiles that count
# when the first answer wants logprobs. All answers waited seconds for it.
vllm_sampler.batched_count_greater_than = _no_counts


class NoScheduler:
    """Stands where vLLM's scheduler would: ``rows.py`` gives the executor its steps itself, so that
    nothing is ever asked of it but what it was made with."""

    connector = ec_connector = None

    def __init__(self, vllm_config: Any, kv_cache_config: Any, **_: Any) -> None:
        self.kv_cache_config = kv_cache_config

    def get_kv_connector(self) -> None:
        return None


class LayerTap(KVConnectorBase_V1):
    """A connector that moves nothing: it hears where KV lies and when a layer's is written.

    vLLM calls ``save_kv_layer`` behind every attention layer, compiled or not; a whole CUDA graph
    would leave it out, so whoever follows layers asks for graphs in pieces.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._ranks: str = extra.get(RANKS, "")
        self._eos = frozenset(extra.get("eos_token_ids", ()))
        self._end: RankEnd | None = None
        self._indices: dict[str, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = sorted(kv_caches, key=extract_layer_index)
        self._indices = {name: idx for idx, name in enumerate(names)}
        STEP.pools = [kv_caches[name] for name in names]
        STEP.eos_token_ids = self._eos
        if self._ranks:
            self._end = RankEnd.open(self._ranks, STEP.pools)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMeta)
        STEP.choices = connector_metadata.choices
        if self._end is not None:
            number, end = connector_metadata.step, self._end
            STEP.on_layer = (
                (lambda layer: end.tell(number, layer))
                if connector_metadata.follows_layers
                else None
            )

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any
    ) -> None:
        if STEP.on_layer is not None:
            STEP.on_layer(self._indices[layer_name])

    def start_load_kv(self, forward_context: Any, **_: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def shutdown(self) -> None:
        # vLLM has just made all objects known to the collector again, and would go through them
        # several times: seconds in which an idle worker only ended.
        gc.freeze()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("follows_layers", True))


class RowSampler(LogitsProcessor):
    """Our sampler in front of that of vLLM's first model runner; see ``_choose``."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._names: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        names = self._names
        for idx in batch_update.removed:
            names.pop(idx, None)
        for idx, params, _, _ in batch_update.added:
            names[idx] = params.extra_args[ROW]
        for source, target, direction in batch_update.moved:
            moved, replaced = names.pop(source, None), names.pop(target, None)
            if moved is not None:
                names[target] = moved
            if direction is MoveDirectionality.SWAP and replaced is not None:
                names[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        num_rows = logits.shape[0]
        return _choose(logits, [(idx, name) for idx, name in self._names.items() if idx < num_rows])


class SlotSampler(SlotProcessor):
    """Our sampler in front of that of vLLM's second model runner, which gives every request a slot
    for as long as it lives, and orders rows anew in each step; see ``_choose``."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self._names: dict[int, str] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._names[req_idx] = (sampling_params.extra_args or {}).get(ROW, "")
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = enumerate(ctx.idx_mapping_np.tolist())
        return _choose(logits, [(idx, self._names.get(slot, "")) for idx, slot in slots])


def _choose(logits: torch.Tensor, rows: Sequence[tuple[int, str]]) -> torch.Tensor:
    """Give rows that choose by other rules than the most likely token logits in which the chosen
    token is the most likely. So vLLM's own argmax finds it, on every rank alike, and its logprobs,
    taken before, are the raw ones. rows: place in ``logits`` and name of each."""
    choices = STEP.choices
    if not choices.specs and not choices.forced:
        return logits
    drawn = [(idx, name) for idx, name in rows if name in choices.specs]
    if drawn:
        places = to_device(np.array([idx for idx, _ in drawn]), logits.device)
        scores = logits.index_select(0, places).float()
        masks = choices.masks_of([name for _, name in drawn])
        picked = sampler.choose(
            scores,
            [choices.specs[name] for _, name in drawn],
            eos_token_ids=STEP.eos_token_ids,
            guide=None if masks is None else partial(sampler.deny, scores, masks),
        )
        _leave(logits, places, picked)
    forced = [(idx, choices.forced[name]) for idx, name in rows if name in choices.forced]
    if forced:
        places = to_device(np.array([idx for idx, _ in forced]), logits.device)
        tokens = to_device(np.array([token_id for _, token_id in forced]), logits.device)
        _leave(logits, places, tokens)
    return logits


def _leave(logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
    logits[places] = float("-inf")
    logits[places, tokens] = 0.0
