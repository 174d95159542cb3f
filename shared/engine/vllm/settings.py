"""Our settings and ``--vllm-args`` as the arguments of vLLM's engine; each is set in one place.

What both sides know is ours, and refused in ``--vllm-args`` with the flag that sets it: vLLM must
not believe in other blocks or lengths than our scheduler. Knows no vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shared.config import WorkerConfig
from shared.errors import InvalidRequest

_OURS: Mapping[str, str] = {
    "model": "--model",
    "model_weights": "--model",
    "hf_config_path": "--model",
    **dict.fromkeys(("revision", "code_revision", "tokenizer"), "--model"),
    "dtype": "--dtype",
    "device": "--device",
    "device_ids": "--device",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-running",
    "max_num_batched_tokens": "--token-budget",
    "block_size": "--block-size",
    "gpu_memory_utilization": "--gpu-memory-share",
    "num_gpu_blocks_override": "--num-blocks",
    "kv_cache_memory_bytes": "--kv-gib",
    "enable_prefix_caching": "--cache-prefixes",
    "seed": "a request's seed",
}
"""What a flag of ours sets."""

_ADVISED: Mapping[str, str] = {
    r"\bVLLM_CPU_KVCACHE_SPACE\b": "--kv-gib",
    r" \((?:which|this flag) also controls CPU memory[^)]*\)": "",  # not here
    **{
        rf"`?(?:--)?\b{key.replace('_', '[-_]')}\b`?": flag
        for key, flag in _OURS.items()
        if "_" in key
    },
}
"""How vLLM's sentences name what a flag of ours sets."""

_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("scheduler_cls", "async_scheduling", "scheduling_policy", "enable_chunked_prefill"),
            *("max_num_scheduled_tokens", "long_prefill_token_threshold", "watermark"),
            *("long_prefill_token_threshold_adaptive", "prefill_schedule_interval"),
            *("max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens"),
            "scheduler_reserve_full_isl",
        ),
        "pdmesh schedules",
    ),
    **dict.fromkeys(
        ("prefix_caching_hash_algo", "prefix_cache_retention_interval", "prefix_match_unit"),
        "pdmesh keeps prefixes",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_events_config", "ec_transfer_config"), "pdmesh moves KV"
    ),
    **dict.fromkeys(
        ("kv_offloading_size", "kv_offloading_backend"),
        "--dram-cache and --ssd-cache keep KV below the pool",
    ),
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size"),
        "a rank must have its heads' KV of every token; tensor_parallel_size is served",
    ),
    **dict.fromkeys(
        (
            *("logits_processors", "watermark_config", "return_sampling_mask"),
            "enable_batch_sharded_sampling",
        ),
        "pdmesh samples",
    ),
    "logprobs_mode": "logprobs are those of the raw distribution",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "speculative decoding is not supported",
    ),
    "enable_lora": "LoRA is not supported",
    "enable_prompt_embeds": "the gateway takes text",
    "trust_remote_code": "code from a model folder is never run",
    "disable_hybrid_kv_cache_manager": "all layers share one kind of block",
    "pipeline_parallel_size": "a layer's KV must be ready before the next layer's, which stages in "
    "a pipeline do not keep to; tensor_parallel_size is served",
    **dict.fromkeys(
        (
            *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
            *("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
            *("data_parallel_external_lb", "data_parallel_hybrid_lb"),
            *("data_parallel_multi_port_external_lb", "data_parallel_backend"),
        ),
        "start more workers instead",
    ),
    "enable_expert_parallel": "experts on several devices need steps in lock-step",
    **dict.fromkeys(
        ("distributed_executor_backend", "nnodes", "node_rank"), "ranks are processes of this host"
    ),
    "load_format": "safetensors alone are loaded",
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokenizer_mode", "tokenizer_revision"),
        "the gateway has the tokenizer",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"), "requests say how to sample"
    ),
}
"""What does not go together with what pdmesh does, and why."""

_IS_ON = (
    *("enable_chunked_prefill", "skip_tokenizer_init", "disable_hybrid_kv_cache_manager"),
    "scheduler_reserve_full_isl",
)
"""Of these the switches that are on here."""

_OF_TORCH = frozenset({"kernels", "cuda_graphs", "max_graph_rows"})

_CHANGES_THE_MODEL = (
    "hf_overrides",
    "quantization",
    "quantization_config",
    "model_class_overrides",
)
"""What makes another function of the same folder: what was computed with it fits nothing else."""


def read_arguments(text: str) -> dict[str, Any]:
    """Return what ``--vllm-args`` names: ``key=value`` with spaces between them, or a file of such
    lines ('#' begins a comment) or of one JSON object. A value is JSON, or text.

    Raises InvalidRequest: a part is no key=value, names what is ours, or is refused.
    """
    path = Path(os.path.expanduser(text))
    if text and "=" not in text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _wrong(
                f"{path} is neither key=value nor a file that can be read ({error})"
            ) from None
        if text.lstrip().startswith("{"):
            return _checked(_object(text, path))
    try:
        parts = shlex.split(text, comments=True)
    except ValueError as error:
        raise _wrong(f"cannot be split into key=value: {error}") from None
    found: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.removeprefix("--").partition("=")
        if not equals or not key:
            raise _wrong(f"{part!r} is no key=value")
        key = key.replace("-", "_")
        if key in found:
            raise _wrong(f"{key} is there twice")
        found[key] = _value(key, value)
    return _checked(found)


def require_effect(config: WorkerConfig) -> None:
    """Raise InvalidRequest for a setting of our own engine, which would be without effect."""
    for it in fields(config):
        if it.name in _OF_TORCH and getattr(config, it.name) != it.default:
            flag = it.name.replace("_", "-")
            raise InvalidRequest(
                f"--{flag} has no effect with --engine vllm: leave it out", param=it.name
            )


def require_known(arguments: Iterable[str], known: AbstractSet[str]) -> None:
    """Raise InvalidRequest for the first argument that vLLM's engine does not take. known: those
    that it takes."""
    for key in arguments:
        if key not in known:
            alike = get_close_matches(key, [*(known - _OURS.keys() - _REFUSED.keys())], 1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            raise _wrong(f"vLLM's engine takes no {key}{hint}")


def require_choice(arguments: Mapping[str, Any], key: str, choices: Sequence[str]) -> None:
    """Raise InvalidRequest for a word that vLLM would take for another one without telling."""
    if arguments.get(key) not in (None, *choices):
        raise _wrong(f"{key} must be one of {', '.join(choices)}, not {arguments[key]!r}")


def changes_of_the_model(arguments: Mapping[str, Any]) -> str:
    """Return what workers must have in common to be of one model; '' = nothing but the folder."""
    changes = {key: arguments[key] for key in _CHANGES_THE_MODEL if arguments.get(key)}
    return json.dumps(changes, sort_keys=True) if changes else ""


def form_of_length(text_config: Any, max_model_len: int) -> str:
    """Return what the longest context that is served decides of the function itself: with Phi-3's
    angles (longrope) vLLM takes others for all positions beyond a length, and so does Llama 4."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings") if "long_factor" in rope else None
    if str(getattr(text_config, "model_type", "")).startswith("llama4"):
        limit = 32_768
    return "long" if limit and max_model_len > limit else ""


def in_our_words(text: str) -> str:
    """Return the first lines of what vLLM says that say something, with our flags for its
    arguments; pydantic, which checks those, adds how it came to its verdict."""
    lines = [
        re.sub(r"^Value error, | \[type=.*\]$| Supported architectures: .*$", "", line.strip())
        for line in text.splitlines()
    ]
    noise = re.compile(r"For further information|\d+ validation errors? for |$")
    text = " ".join([line for line in lines if not noise.match(line)][:3])[:600]
    for pattern, flag in _ADVISED.items():
        text = re.sub(pattern, flag, text)
    return re.sub(r"(--[a-z-]+)(?:(?:,| or| and) \1)+\b", r"\1", text)


def num_ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many ranks compute together. Raises InvalidRequest."""
    ranks = arguments.get("tensor_parallel_size", 1)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= 64:
        raise _wrong(f"tensor_parallel_size must be 1..64, not {ranks!r}")
    return ranks


def is_eager(arguments: Mapping[str, Any]) -> bool:
    """Return whether vLLM compiles nothing. Raises InvalidRequest."""
    wanted = arguments.get("enforce_eager", False)
    if wanted not in (True, False):
        raise _wrong(f"enforce_eager must be true or false, not {wanted!r}")
    return bool(wanted)


def block_size_of(config: WorkerConfig, *, is_cpu: bool, has_latent_kv: bool) -> int:
    """Return the tokens of a block: what was asked for, else what vLLM's attention likes best.

    Raises InvalidRequest: vLLM's kernels cannot have such blocks."""
    if is_cpu and has_latent_kv:
        sizes, default = "16", 16
        is_right = config.block_size in (0, 16)
    elif is_cpu:
        sizes, default = "a multiple of 32", 32
        is_right = config.block_size % 32 == 0
    else:
        sizes, default = "a multiple of 16", 16
        is_right = config.block_size % 16 == 0
    if not is_right:
        raise InvalidRequest(
            f"--block-size must be {sizes} with --engine vllm here, or 0 for its choice",
            param="block_size",
        )
    return config.block_size or default


def _object(text: str, path: Path) -> dict[str, Any]:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{path} is no JSON object: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError: a key is there twice, of which one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is there twice")
    return found


def _value(key: str, text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if text.startswith(("{", "[")):
            raise _wrong(
                f"{key} is no JSON ({error}): quotes are a shell's here, so write {key}='{{...}}'"
            ) from None
        return text


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    for key in arguments:
        if key in _OURS:
            raise _wrong(f"{key} is set by {_OURS[key]}")
        if key in _REFUSED and not _changes_nothing(key, arguments[key]):
            raise _wrong(f"{key}: {_REFUSED[key]}")
    num_ranks(arguments)
    is_eager(arguments)
    # What is as it is anyway is said to vLLM by us.
    return {key: value for key, value in arguments.items() if key not in _REFUSED}


def _changes_nothing(key: str, value: Any) -> bool:
    """Whether a refused argument is set to what holds anyway. True equals 1, and a switch that is
    on is not a size of one."""
    if key.endswith("_parallel_size"):
        return value is None or (value == 1 and not isinstance(value, bool))
    return value in (key in _IS_ON, None)


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(f"--vllm-args: {text}", param="vllm_args")
