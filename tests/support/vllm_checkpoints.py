"""Small random checkpoints of families and quantisations that vLLM runs and our own engine does
not, and what vLLM alone answers to them.

    python -m tests.support.vllm_checkpoints FAMILY FOLDER

Quantised ones are made without a quantiser: codes and scales of a dense llama are rounded here and
written in the form that the tools of that format write.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import randomise, rewrite_config
from tests.support.house import ROOT
from tests.support.tiny_tokenizer import EOS, TEMPLATE, tiny_tokenizer

VOCAB = 512
MAX_LEN = 1024
SEED = 0

_HEADS: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_LATENT: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
"""The one shape of latent KV that vLLM's CPU kernel has."""

_WINDOW = 48

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", _HEADS),
    "llama_4_heads": ("Llama", {**_HEADS, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", _HEADS),
    "mistral": ("Mistral", {**_HEADS, "sliding_window": _WINDOW}),
    "mixtral": (
        "Mixtral",
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            **_HEADS,
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "minicpm3": (
        "MiniCPM3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "dim_model_base": 128,
        },
    ),
    "glm4": ("Glm4", _HEADS),
    "olmo2": ("Olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1},
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 32,
            "n_groups": 1,
            "expand": 2,
            "num_hidden_layers": 2,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
        },
    ),
}
"""Family -> the name of its classes in transformers, and config keys beyond the common ones."""

QUANTISED: Mapping[str, Callable[[Path], None]]
"""Family -> what turns a folder with a dense llama into the quantised one. Set below."""

LATENT = frozenset({"deepseek_v2", "deepseek_v3"})
"""Families with latent KV (MLA): blocks of 16 on a CPU."""


def families() -> list[str]:
    """Return all names that ``make`` knows."""
    return [*FAMILIES, *QUANTISED]


def make(
    family: str, folder: Path, dtype: str = "float32", *, with_tokenizer: bool = False
) -> Path:
    """Write a seeded random checkpoint (config, generation config, safetensors).

    dtype: of the weights that are not quantised. with_tokenizer: add the tiny tokenizer and its
    chat template, and its end-of-sequence token.
    """
    eos = EOS if with_tokenizer else None
    name, keys = FAMILIES["llama" if family in QUANTISED else family]
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**{**_COMMON, **keys}, eos_token_id=eos)
    model_class = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = model_class(config)
    _spread(model)
    model = model.to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    if family in QUANTISED:
        QUANTISED[family](folder)
    if with_tokenizer:
        add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Write the tiny tokenizer and its chat template beside the weights."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
        "model_max_length": MAX_LEN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


class _Matrices(torch.nn.Module):
    """A model without those parameters that ``randomise`` has no rule for."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            if parameter.dim() > 1 or name.endswith(("norm.weight", "bias")):
                yield name, parameter


def _spread(model: Any) -> None:
    """Seeded weights as ``randomise`` has them; state-space parameters keep the values that keep
    them stable, and experts in one tensor get their spread by what they sum over."""
    kept = ("A_log", "dt_bias", ".D", "conv1d.weight")
    fresh = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name.endswith(kept)
    }
    randomise(_Matrices(model), SEED)
    generator = torch.Generator().manual_seed(SEED + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in fresh:
                parameter.copy_(fresh[name])
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif (
                name.endswith("embed_tokens.weight")
                and parameter is model.get_output_embeddings().weight
            ):
                parameter.mul_(0.05)  # else each token's best successor is itself
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 3:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.5 / max(parameter.shape[1:]) ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


_GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output a nibble of a packed word of AWQ belongs to."""


def _linear_weights(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.endswith("_proj.weight")]


def _rewrite(
    folder: Path,
    quantise: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    config: Mapping[str, Any],
    more: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Replace every projection's weight by what ``quantise(prefix, weight)`` makes of it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in _linear_weights(tensors):
        weight = tensors.pop(name).float()
        tensors.update(quantise(name.removesuffix("weight"), weight))
    tensors.update(more or {})
    save_file(
        {name: it.contiguous() for name, it in tensors.items()}, path, metadata={"format": "pt"}
    )

    def change(values: dict[str, Any]) -> None:
        values["quantization_config"] = dict(config)

    rewrite_config(folder, change)


def _pack(codes: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight codes of four bits along the last axis into one int32, the first one lowest."""
    words = codes.to(torch.int64).unflatten(-1, (-1, 8))
    packed = sum(words[..., it] << (4 * place) for place, it in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _int4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 around 8 ``[out, in]`` and scales ``[out, groups]``."""
    groups = weight.unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.flatten(1).to(torch.int64), scale


def _awq(folder: Path) -> None:
    def quantise(prefix: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        codes, scale = _int4_groups(weight)
        zeros = torch.full_like(scale.T, 8)
        return {
            f"{prefix}qweight": _pack(codes.T.contiguous(), _AWQ_ORDER),
            f"{prefix}qzeros": _pack(zeros.contiguous(), _AWQ_ORDER),
            f"{prefix}scales": scale.T.half(),
        }

    _rewrite(
        folder,
        quantise,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    )


def _gptq(folder: Path) -> None:
    def quantise(prefix: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        codes, scale = _int4_groups(weight)
        zeros = torch.full_like(scale.T, 7)  # this format keeps them one lower
        return {
            f"{prefix}qweight": _pack(codes).T,
            f"{prefix}qzeros": _pack(zeros.contiguous()),
            f"{prefix}scales": scale.T.half(),
            f"{prefix}g_idx": (torch.arange(weight.shape[1]) // _GROUP).to(torch.int32),
        }

    _rewrite(
        folder,
        quantise,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
    )


def _compressed(weights: Any, inputs: Any, form: str, **more: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **more,
    }


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        **more,
    }


def _w8a8(folder: Path) -> None:
    def quantise(prefix: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        return {f"{prefix}weight": codes, f"{prefix}weight_scale": scale}

    inputs = _numbers(8, "int", "token", dynamic=True)
    _rewrite(folder, quantise, _compressed(_numbers(8, "int", "channel"), inputs, "int-quantized"))


def _w4a16(folder: Path) -> None:
    def quantise(prefix: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        codes, scale = _int4_groups(weight)
        return {
            f"{prefix}weight_packed": _pack(codes),
            f"{prefix}weight_scale": scale,
            f"{prefix}weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    weights = _numbers(4, "int", "group", group_size=_GROUP)
    _rewrite(folder, quantise, _compressed(weights, None, "pack-quantized"))


def _fp8_weights(prefix: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    scale = weight.abs().max() / 448
    return {
        f"{prefix}weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{prefix}weight_scale": scale,
    }


def _fp8(folder: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    _rewrite(folder, _fp8_weights, config)


def _fp8_kv(folder: Path) -> None:
    """An fp8 checkpoint that brings scales for its KV, different ones in each layer."""
    scales: dict[str, torch.Tensor] = {}
    for layer in range(_COMMON["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        scales[f"{prefix}.k_scale"] = torch.tensor(0.5 + 0.25 * layer)
        scales[f"{prefix}.v_scale"] = torch.tensor(0.25 + 0.125 * layer)
    weights = _numbers(8, "float", "tensor")
    inputs = _numbers(8, "float", "token", dynamic=True)
    kv = _numbers(8, "float", "tensor")
    config = _compressed(weights, inputs, "float-quantized", kv_cache_scheme=kv)
    _rewrite(folder, _fp8_weights, config, scales)


QUANTISED = {
    "awq": _awq,
    "gptq": _gptq,
    "w8a8": _w8a8,
    "w4a16": _w4a16,
    "fp8": _fp8,
    "fp8_kv": _fp8_kv,
}


def reference(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    dtype: str = "float32",
    block_size: int = 32,
    timeout: float = 300,
    one_by_one: bool = False,
    **arguments: Any,
) -> list[list[int]]:
    """Greedy answers of vLLM alone, in a process of its own: ``num_tokens`` each, no end.

    block_size: 16 for latent KV. one_by_one: no two share a step. arguments: more of vLLM's engine
    arguments.
    """
    given = {
        "model": str(folder),
        "dtype": dtype,
        "block_size": block_size,
        "prompts": [list(prompt) for prompt in prompts],
        "num_tokens": num_tokens,
        "one_by_one": one_by_one,
        "arguments": arguments,
    }
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_checkpoints", "--answer"],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM does not run {folder}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answer(given: Mapping[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()  # as plugins.py does, and why
    arguments = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": MAX_LEN,
        "disable_hybrid_kv_cache_manager": True,
        **given["arguments"],
    }
    llm = LLM(
        model=given["model"], dtype=given["dtype"], block_size=given["block_size"], **arguments
    )
    params = SamplingParams(
        temperature=0, max_tokens=given["num_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    batches = [[prompt] for prompt in prompts] if given["one_by_one"] else [prompts]
    outputs = [it for batch in batches for it in llm.generate(batch, params, use_tqdm=False)]
    return [list(it.outputs[0].token_ids) for it in outputs]


def main() -> None:
    """Make a checkpoint, or answer what ``reference`` asks on standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("family", nargs="?", choices=families())
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--with-tokenizer", action="store_true")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        print(json.dumps(_answer(json.load(sys.stdin))))
        return
    if args.family is None or args.folder is None:
        parser.error("FAMILY and FOLDER are needed")
    make(args.family, args.folder, args.dtype, with_tokenizer=args.with_tokenizer)


if __name__ == "__main__":
    main()
