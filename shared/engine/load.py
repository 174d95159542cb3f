"""Which engine a worker runs, by its configuration: the one place where that is chosen.

Imports torch only for the torch engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from shared.config import DecodeConfig, WorkerConfig
from shared.control_groups import granted_cores, num_cores
from shared.engine.base import DEFAULT_BLOCK_SIZE, Engine
from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.engine.memory.staging import slots_of_a_way
from shared.engine.models.registry import read_model_config
from shared.engine.native.build import (
    INSTRUCTIONS,
    NATIVE,
    NUMBERS,
    Unavailable,
    best_instructions,
    find_compiled,
    unsupported,
)
from shared.engine.sampling.guides import Guides
from shared.model_folder import ModelFolder, resolve_model
from shared.object_reference import is_reference, load_object
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES

_log = structlog.get_logger(__name__)

FAKE_NUM_BLOCKS = 1024


def load_engine(config: WorkerConfig, begins: Callable[[str], None] = lambda _: None) -> Engine:
    """Load the model and allocate its KV pool; takes seconds, so not on an event loop.

    begins: called with each slow part as it begins.
    Raises ModelError: there is no such model, or it is unsupported or damaged. EngineFailed: the
    device is missing or too small.
    """
    folder = resolve_model(config.model)
    files = ModelFolder(folder)
    if files.file("tokenizer.json") is not None:  # else every answer to a grammar would fail
        files.read_tokenizer()
    if config.engine == "fake":
        return _fake(config, files)
    if config.engine == "vllm":
        return _vllm(config, folder, begins)
    if is_reference(config.engine):
        return load_object(config.engine, "--engine")(folder, config)
    begins("importing torch")
    from shared.engine.gpu.device_memory import MemoryNeeds
    from shared.engine.memory.paged_kv import TORCH_DTYPES
    from shared.engine.native import library
    from shared.engine.torch_engine import TorchEngine

    if kernels := _kernels_to_compile(config, files):
        begins("compiling kernels, once for this machine")
        numbers, named = kernels
        with suppress(Unavailable):  # the engine says why it does without
            library.load(TORCH_DTYPES[numbers], named)
    begins("loading weights")
    return TorchEngine.load(
        folder,
        device=config.device,
        dtype=config.dtype,
        num_blocks=config.num_blocks or None,
        kv_bytes=round(config.kv_gib * (1 << 30)) or None,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        max_model_len=config.max_model_len or None,
        num_threads=_num_threads(config.threads),
        kernels=config.kernels,
        max_graph_rows=_max_graph_rows(config),
        memory_needs=MemoryNeeds(
            share=config.gpu_memory_share,
            step_tokens=config.max_step_tokens,
            max_rows=config.max_running,
            staging_bytes=_staging_bytes(config),
        ),
        exact=config.exact,
    )


def _vllm(config: WorkerConfig, folder: Path, begins: Callable[[str], None]) -> Engine:
    from shared.engine.vllm.release import prepare_environment, release, silence_start
    from shared.engine.vllm.settings import is_eager, num_ranks, read_arguments, require_effect

    installed = release()
    require_effect(config)
    arguments = read_arguments(config.vllm_args)
    ranks = num_ranks(arguments)
    threads = threads_of_a_rank(config.threads, ranks)
    prepare_environment(threads, ranks, is_eager=is_eager(arguments))
    silence_start()
    begins("importing vllm")
    from shared.engine.vllm.load import load_vllm

    return load_vllm(folder, config, arguments, installed, begins)


def threads_of_a_rank(asked: int, num_ranks: int) -> int:
    """Return CPU threads of each of vLLM's processes; 0 = OpenMP's own variable says it."""
    if not asked and "OMP_NUM_THREADS" in os.environ:
        return 0
    return max(1, _num_threads(asked) // num_ranks)


def _kernels_to_compile(config: WorkerConfig, folder: ModelFolder) -> tuple[str, str] | None:
    """Return numbers and, if they are named, instructions of the native kernels whose first use
    here is now."""
    from shared.engine.device import resolve_device

    is_native = config.kernels in NATIVE or (
        config.kernels == "auto" and resolve_device(config.device).type == "cpu"
    )
    numbers = config.dtype if config.dtype != "auto" else read_model_config(folder).dtype
    if not is_native or numbers not in NUMBERS:
        return None
    named = config.kernels if config.kernels in INSTRUCTIONS else ""
    instructions = named or best_instructions(numbers)
    found = find_compiled(numbers, instructions)
    if unsupported(instructions) or any(not reason for _, reason in found):
        return None
    return numbers, named


def _num_threads(asked: int) -> int:
    cores = num_cores()
    if asked > cores:
        reason = f"{asked} threads, {granted_cores():g} cores: they wait for each other"
        _log.warning("more compute threads than cores", reason=reason)
    return asked or cores


def _max_graph_rows(config: WorkerConfig) -> int:
    """Largest decode batch to record; 0 = none: prefill's steps are never the same twice."""
    decodes = isinstance(config, DecodeConfig) or config.movable
    if not decodes or not config.cuda_graphs:
        return 0
    return min(config.max_graph_rows, config.max_running)


def _staging_bytes(config: WorkerConfig) -> int:
    """What all slots take. Who does either role's work has as many for both ways."""
    mib, num_slots = config.staging_mib, 0
    if config.movable or config.share_prefixes:
        num_slots = slots_of_a_way(mib, for_prefixes=not config.movable)
    return (slots_of_a_way(mib, for_prefixes=False) + num_slots) * DEFAULT_MAX_FRAME_BYTES


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
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        timing=timing,
        real_time=config.fake_step_s > 0,
        guides=Guides.of(folder, model.vocab_size, model.eos_token_ids),
    )
