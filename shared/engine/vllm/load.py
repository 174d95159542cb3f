"""Makes the engine: from a model folder and our settings to vLLM's executor with our plug-ins."""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import structlog
import torch

from shared.config import DecodeConfig, WorkerConfig
from shared.engine.base import DEFAULT_CPU_KV_BYTES
from shared.engine.device import require_shareable_memory, resolve_device
from shared.engine.failures import DeviceFailures, words_of
from shared.engine.gpu.streams import CudaStreams, Streams
from shared.engine.memory.paged_kv import TORCH_DTYPES
from shared.engine.models.registry import read_model_config
from shared.engine.models.weights import Checkpoint
from shared.engine.sampling.guides import Guides
from shared.engine.vllm import settings
from shared.engine.vllm.engine import VllmEngine
from shared.engine.vllm.meeting import leave, meet, require_room_for_sockets
from shared.engine.vllm.plugins import RANKS, STEP
from shared.engine.vllm.pools import DevicePools, HostPools, Pools
from shared.engine.vllm.ranks import LayerEvents, map_pools, why_failed, write_logging
from shared.engine.vllm.release import find_compiler
from shared.errors import EngineFailed, MeshError, ModelError
from shared.kv.layout import KvLayout
from shared.model_folder import ModelFolder
from shared.model_spec import ModelSpec

_log = structlog.get_logger(__name__)

_KV_DTYPES = {kind: name for name, kind in TORCH_DTYPES.items()}
_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


def load_vllm(
    folder: Path,
    config: WorkerConfig,
    arguments: Mapping[str, Any],
    release: str,
    begins: Callable[[str], None],
) -> VllmEngine:
    """Load a model folder into vLLM and return the engine over it; once a process.

    arguments: what ``--vllm-args`` says. release: of the vLLM that is installed. begins: told of
    each slow part.
    Raises ModelError: the model or a setting does not go with this engine. InvalidRequest: a
    setting is wrong. EngineFailed: the device is missing or too small.
    """
    if STEP.has_engine:
        raise EngineFailed("a process holds one vLLM engine, and this one has it already")
    files = ModelFolder(folder)
    num_ranks = settings.num_ranks(arguments)
    device = resolve_device(config.device)
    _require_possible(config, arguments, device, num_ranks)
    num_threads = torch.get_num_threads() * num_ranks
    checkpoint = Checkpoint(files)
    if any(name.endswith("sinks") for name in checkpoint.tensors):
        # With sinks vLLM's CPU kernel gives other sums each time, where several threads share a
        # row's keys and a window leaves some to none of them.
        os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
    with contextlib.ExitStack() as stack:
        meeting, lock = meet()
        stack.callback(os.close, lock)
        stack.callback(leave, meeting)
        events = None
        if num_ranks > 1:
            require_room_for_sockets(meeting)
            events = LayerEvents(meeting, num_ranks)
            stack.callback(events.close)
        wanted = _configured(files, config, arguments, device, meeting if events else None)
        has_amx = _has_amx(wanted, device)
        if has_amx:
            # Its attention rounds weights to bfloat16: where threads share a row's keys, as they do
            # if a step has few rows, an answer would depend on what else is in its steps.
            os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
        STEP.has_engine = True  # whether or not it can be made: vLLM keeps what it has begun
        core = _core(wanted, begins, meeting)
        stack.callback(_end, core)
        checkpoint.require_same()  # vLLM has opened the files anew
        group = _only_group(core, folder)
        layout = _layout(wanted, group)
        spec = _spec(checkpoint, wanted, arguments, f"{release} amx" if has_amx else release)
        block_size = wanted.cache_config.block_size
        pools: Pools
        streams = Streams()
        if device.type == "cuda":
            pools = DevicePools(STEP.pools, layout, block_size)
            streams = CudaStreams(layout.num_layers, device, _stream_of_steps(core))
        else:
            ranks = [STEP.pools] if events is None else map_pools(meeting, num_ranks)
            pools = HostPools(ranks, layout, block_size, is_tiled=_is_tiled(wanted, group))
        compiled = "eager" if wanted.model_config.enforce_eager else "compiled"
        facts = {
            "kernels": f"vllm {release}, {compiled}",
            "threads": str(num_threads),
            "torch": torch.__version__,
            "ranks": str(num_ranks),
            "runner": "second" if wanted.use_v2_model_runner else "first",
        }
        _log.info(
            "model is computed by vllm", engine=spec.engine, dtype=layout.dtype, mode=compiled
        )
        if device.type == "cpu" and layout.parts == 1:
            _log.warning(
                "vllm's latent attention on a CPU is for trying things out: its answers depend on "
                "what else is in a step"
            )
        leave(meeting)
        if events is not None:
            events.watch(_end_without_ranks)
            stack.callback(events.watch, None)  # from here on they may end
        return VllmEngine(
            core,
            spec,
            layout,
            pools,
            num_blocks=wanted.cache_config.num_gpu_blocks - 1,
            block_size=block_size,
            device=device,
            streams=streams,
            guides=Guides.of(files, spec.vocab_size, spec.eos_token_ids),
            facts=facts,
            events=events,
            queues=device.type == "cuda" and wanted.use_v2_model_runner,
            resources=stack.pop_all(),
        )


def _require_possible(
    config: WorkerConfig, arguments: Mapping[str, Any], device: torch.device, num_ranks: int
) -> None:
    if config.exact:
        raise ModelError(
            "--exact: vLLM's kernels do not promise the same bits for any batch; take --dtype "
            "float32, or --engine torch for the families that it knows",
            code="vllm_exact",
        )
    if device.type == "cuda":
        require_shareable_memory(os.environ)
        if num_ranks > 1:
            raise ModelError(
                "--vllm-args tensor_parallel_size: ranks on GPUs are not supported yet; on CPU "
                "they are (docs/vllm.md)",
                code="vllm_ranks",
            )
        return
    if not settings.is_eager(arguments) and not find_compiler():
        raise ModelError(
            "--engine vllm: vLLM compiles the model with a C++ compiler, and there is none: "
            "install g++, or say --vllm-args enforce_eager=true, which is a little slower",
            code="vllm_compiler",
        )


def _end_without_ranks() -> None:
    """A rank has ended. The others wait for it without end, and vLLM for them, so no error would
    reach anybody: the process ends here, and its requests move."""
    _log.error(
        "stopped",
        error="a rank of this worker has ended (out of memory?), and with it the worker",
        error_type=EngineFailed.__name__,
    )
    os._exit(1)


def _configured(
    files: ModelFolder,
    config: WorkerConfig,
    arguments: Mapping[str, Any],
    device: torch.device,
    meeting: Path | None,
) -> Any:
    """Return vLLM's configuration for our settings. Raises ModelError: it refuses them."""
    from vllm.config.logging import LoggingConfig
    from vllm.config.model import ModelImpl
    from vllm.engine.arg_utils import EngineArgs

    is_cpu = device.type == "cpu"
    follows_layers = config.movable or not isinstance(config, DecodeConfig)
    kv_bytes = round(config.kv_gib * (1 << 30)) or (DEFAULT_CPU_KV_BYTES if is_cpu else None)
    model_len = config.max_model_len or None
    common: dict[str, Any] = {
        "model": str(files.path),
        "dtype": config.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": model_len,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": max(config.max_step_tokens, config.max_running),
        "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "load_format": "safetensors",
        "num_gpu_blocks_override": config.num_blocks + 1 if config.num_blocks else None,
        "kv_cache_memory_bytes": kv_bytes,
        "scheduler_cls": "shared.engine.vllm.plugins.NoScheduler",
        "kv_transfer_config": {
            "kv_connector": "LayerTap",
            "kv_connector_module_path": "shared.engine.vllm.plugins",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                RANKS: "" if meeting is None else str(meeting),
                "eos_token_ids": sorted(files.eos_token_ids),
                "follows_layers": follows_layers,
            },
        },
    }
    if not is_cpu:
        common["gpu_memory_utilization"] = config.gpu_memory_share
    settings.require_known(arguments, {field.name for field in dataclasses.fields(EngineArgs)})
    impls = [impl for impl in get_args(ModelImpl) if impl != "terratorch"]  # which has no text
    settings.require_choice(arguments, "model_impl", impls)
    try:
        # Not every model with such a rank keeps the latent vector (MiniCPM3 keeps keys and values).
        has_latent_kv = (
            files.text_config.get("kv_lora_rank") is not None
            and EngineArgs(**common | dict(arguments)).create_model_config().use_mla
        )
        common["block_size"] = settings.block_size_of(
            config, is_cpu=is_cpu, has_latent_kv=has_latent_kv
        )
        if is_cpu and has_latent_kv and "attention_config" not in arguments:
            # That for AMX knows bfloat16 alone, other blocks, and is taken for any dtype.
            common["attention_backend"] = "CPU_MLA"
        made = EngineArgs(**common | dict(arguments)).create_engine_config()
    except MeshError:
        raise
    except Exception as error:
        raise ModelError(f"vLLM refuses this model or --vllm-args: {_told(error)}") from error
    backend = made.attention_config.backend
    # Of some models (Gemma 4) vLLM names one itself, which its CPU build passes over.
    is_named = "attention_backend" in arguments or "attention_config" in arguments
    if is_cpu and is_named and backend is not None and not backend.name.startswith("CPU_"):
        raise ModelError(
            f"--vllm-args: the attention backend {backend.name} is of another device, and on a CPU "
            "vLLM has one of its own: name none",
            code="vllm_backend",
        )
    _require_served(made.model_config, files)
    sampler = "SlotSampler" if made.use_v2_model_runner else "RowSampler"
    made.model_config.logits_processors = [f"shared.engine.vllm.plugins:{sampler}"]
    log = made.logging_config
    if meeting is not None:
        level = log.log_level if log.configure_logging else "ERROR"
        file = write_logging(meeting, level, log.pylogging_config_file)
        made.logging_config = LoggingConfig(configure_logging=True, pylogging_config_file=file)
    return made


def _stream_of_steps(core: Any) -> torch.cuda.Stream | None:
    """Return the stream that vLLM's second model runner copies tokens behind, which it keeps from
    its first step; None: the first one takes what is current."""
    runner = core.model_executor.driver_worker.worker.model_runner
    return getattr(runner, "main_stream", None)


def _require_served(model: Any, files: ModelFolder) -> None:
    """Raises ModelError: the model keeps another state than KV of all its tokens."""
    for name, what in (
        ("is_hybrid", "layers without attention (Mamba, linear attention)"),
        ("is_attention_free", "no attention"),
        ("has_inner_state", "a state that is not KV"),
        ("is_encoder_decoder", "an encoder"),
    ):
        if getattr(model, name, False):
            raise ModelError(
                f"{files.path}: {', '.join(model.architectures)} has {what}: its state cannot be "
                "handed from prefill to decode block by block. docs/models.md says what can",
                code="vllm_model",
            )
    if model.runner_type != "generate":
        raise ModelError(
            f"{files.path}: {', '.join(model.architectures)} generates no text",
            code="vllm_model",
        )


def _core(wanted: Any, begins: Callable[[str], None], meeting: Path) -> Any:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor, multiproc_executor, uniproc_executor

    # Else its sockets, and its file, after which ranks name their shared memory, stay for ever.
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(meeting))
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = lambda: f"file://{meeting}/{meeting.name}"
    eager = wanted.model_config.enforce_eager
    begins("vllm: loading weights" + ("" if eager else ", compiling (a minute or more)"))
    try:
        with DeviceFailures("starting vLLM"):
            return EngineCore(wanted, Executor.get_class(wanted), log_stats=False)
    except Exception as error:
        why = settings.in_our_words(why_failed(meeting))
        told = (why or _told(error)).replace("--gpu-memory-share", _sizes_kv(wanted.cache_config))
        if "AssertionError" in told:  # vLLM takes sizes for granted
            told += ": config.json or hf_overrides do not fit its weights?"
        elif not why and isinstance(error, MeshError):
            raise
        raise ModelError(f"vLLM cannot load this model: {told}") from error


def _sizes_kv(cache: Any) -> str:
    """Return the flag of ours that says how much KV there is; on a CPU vLLM names that of GPUs."""
    if cache.num_gpu_blocks_override:
        return "--num-blocks"
    return "--kv-gib" if cache.kv_cache_memory_bytes else "--gpu-memory-share"


def _end(core: Any) -> None:
    """Do what ``EngineCore.shutdown`` does, but for collecting garbage: the process ends anyway."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    core.model_executor.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


def _told(error: Exception) -> str:
    return settings.in_our_words(words_of(error))


def _only_group(core: Any, folder: Path) -> Any:
    """Return the specification of the one kind of KV. Raises ModelError: there are several."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ModelError(
            f"{folder}: its layers keep {len(groups)} kinds of KV, and a block here is one kind",
            code="vllm_model",
        )
    return groups[0].kv_cache_spec


def _has_amx(wanted: Any, device: torch.device) -> bool:
    """Whether AMX multiplies, which adds in an order of its own: a mesh must tell such workers."""
    dtype = wanted.model_config.dtype
    if device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
        return False
    is_half = dtype == torch.float16 and torch.cpu._is_amx_fp16_supported()
    return is_half or dtype == torch.bfloat16


def _is_tiled(wanted: Any, group: Any) -> bool:
    """Whether vLLM's attention keeps KV as AMX's tiles; on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cached = wanted.model_config, wanted.cache_config.cache_dtype
    if model.use_mla:
        return False
    return _get_attn_isa(model.dtype, group.block_size, group.head_size, cached) == "amx"


def _layout(wanted: Any, group: Any) -> KvLayout:
    model = wanted.model_config
    cached = wanted.cache_config.cache_dtype
    dtype = _FP8.get(cached) or _KV_DTYPES.get(group.dtype)
    if dtype is None:
        raise ModelError(
            f"--vllm-args kv_cache_dtype={cached}: KV is moved in 32 and 16 bits and as fp8, "
            "without scales of its own",
            code="vllm_model",
        )
    num_layers = model.get_num_layers(wanted.parallel_config)
    parts, heads = (1, 1) if model.use_mla else (2, model.get_total_num_kv_heads())
    return KvLayout(
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=group.head_size,
        parts=parts,
    )


def _spec(
    checkpoint: Checkpoint, wanted: Any, arguments: Mapping[str, Any], release: str
) -> ModelSpec:
    files, model = checkpoint.folder, wanted.model_config
    served = str(model.dtype).removeprefix("torch.")
    eos = files.eos_token_ids
    canonical = _canonical(files) + settings.changes_of_the_model(arguments)
    canonical += settings.form_of_length(model.hf_text_config, model.max_model_len)
    vocab_size = model.get_vocab_size()
    return ModelSpec(
        name=files.name,
        fingerprint=checkpoint.digest(
            *(canonical, served, repr(sorted(eos))), vocab_size=vocab_size
        ),
        vocab_size=vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=eos,
        dtype=served,
        engine=f"vllm {release}",
    )


def _canonical(files: ModelFolder) -> str:
    """What the function is: of families that our own engine knows in its words, so that both may
    serve one mesh; of others config.json itself."""
    try:
        return read_model_config(files).canonical()
    except ModelError:
        return hashlib.sha256((files.path / "config.json").read_bytes()).hexdigest()
