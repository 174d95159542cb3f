"""Which engine a worker runs, by its configuration: the one place where that is chosen.

Imports torch only for the torch engine.
"""

from __future__ import annotations

from shared.config import DecodeConfig, WorkerConfig
from shared.engine.base import Engine
from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.model_folder import ModelFolder, resolve_model

FAKE_NUM_BLOCKS = 1024


def load_engine(config: WorkerConfig) -> Engine:
    """Load the model and allocate its KV pool; takes seconds, so not on an event loop.

    Raises ModelError: there is no such model, or it is unsupported or damaged. EngineFailed: the
    device is missing or too small.
    """
    folder = resolve_model(config.model)
    if config.engine == "fake":
        return _fake(config, ModelFolder(folder))
    from shared.engine.torch_engine import TorchEngine

    return TorchEngine.load(
        folder,
        device=_device(config.device),
        dtype=config.dtype,
        num_blocks=config.num_blocks or None,
        kv_bytes=round(config.kv_gib * (1 << 30)) or None,
        block_size=config.block_size,
        max_model_len=config.max_model_len or None,
        num_threads=config.threads or None,
        kernels=config.kernels,
        max_graph_rows=_max_graph_rows(config),
        exact=config.exact,
    )


def _max_graph_rows(config: WorkerConfig) -> int:
    """Largest decode batch to record; 0 = none: prefill's steps are never the same twice."""
    if not isinstance(config, DecodeConfig) or not config.cuda_graphs:
        return 0
    return min(config.max_graph_rows, config.max_running)


def _fake(config: WorkerConfig, folder: ModelFolder) -> FakeEngine:
    """An engine that speaks the vocabulary of a real model, so that the same tokenizer serves."""
    model = FakeModel(
        vocab_size=folder.vocab_size,
        max_model_len=config.max_model_len or folder.max_model_len,
        eos_token_ids=tuple(sorted(folder.eos_token_ids)) or (0,),
    )
    timing = FakeTiming(
        base_s=config.fake_step_s, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0
    )
    return FakeEngine(
        model=model,
        num_blocks=config.num_blocks or FAKE_NUM_BLOCKS,
        block_size=config.block_size,
        timing=timing,
        real_time=config.fake_step_s > 0,
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
