"""Small random checkpoints in every family and shape, and what transformers computes from them.

Weights are seeded, norms and biases are not the ones and zeros of a fresh model, and the spread is
large enough that the best two logits are far apart: a greedy token that differs is a bug, not a
tie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Shape:
    """One entry of the table. keys: config keys beyond the common ones."""

    family: str
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 64
    layers: int = 2
    vocab: int = 199
    keys: Mapping[str, Any] = field(default_factory=dict)


SHAPES: dict[str, Shape] = {
    "llama-gqa2": Shape("llama"),
    "llama-mha": Shape("llama", kv_heads=4, vocab=256),
    "llama-mqa-tied": Shape("llama", kv_heads=1, keys={"tie_word_embeddings": True}),
    "llama-gqa4-biases": Shape(
        "llama", heads=8, keys={"attention_bias": True, "mlp_bias": True}, layers=3
    ),
    "llama-llama3-rope": Shape("llama", keys={"rope_theta": 500_000.0, "rope": _LLAMA3_ROPE}),
    "llama-linear-rope": Shape("llama", keys={"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn-rope": Shape(
        "llama",
        keys={
            "rope": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "llama-own-head-dim": Shape("llama", keys={"head_dim": 24}, vocab=131),
    "mistral-window": Shape("mistral", keys={"sliding_window": 24}),
    "mistral-no-window": Shape("mistral", keys={"sliding_window": None}, kv_heads=1),
    "qwen2-tied": Shape("qwen2", keys={"tie_word_embeddings": True}),
    "qwen2-window-upper": Shape(
        "qwen2",
        layers=3,
        keys={"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
    ),
    "qwen3-own-head-dim": Shape("qwen3", keys={"head_dim": 32}, vocab=257),
    "qwen3-bias-mixed-windows": Shape(
        "qwen3",
        heads=6,
        kv_heads=2,
        hidden=48,
        layers=4,
        keys={
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
}
"""Shape name -> shape, for ``make_checkpoint``."""

MAX_LEN = 2048


def make_checkpoint(
    family: str,
    shape_name: str,
    folder: Path,
    *,
    form: int = 5,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """Write a random model folder (config, generation config, safetensors; no tokenizer).

    form: of config.json, as transformers 4 or 5 writes it. shard_bytes: split the weights.
    """
    shape = SHAPES[shape_name]
    assert shape.family == family, f"{shape_name} is a {shape.family} shape"
    config_class, model_class = _CLASSES[family]
    keys = dict(shape.keys)
    rope = {"rope_theta": keys.pop("rope_theta", 10_000.0), **keys.pop("rope", {})}
    rope.setdefault("rope_type", "default")
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 2 + 8,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_LEN,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        **keys,
    )
    model = model_class(config)
    randomise(model, seed)
    model = model.to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = eos_token_id
    sizes = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **sizes)
    if form == 4:
        rewrite_config(folder, _to_form_4)
    return folder


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter seeded values that matter for the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            elif "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)


def rewrite_config(folder: Path, change: Any) -> None:
    """Apply a function to the parsed config.json and write it back."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    changed = change(values)
    path.write_text(json.dumps(values if changed is None else changed))


def _to_form_4(values: dict[str, Any]) -> None:
    """Write the keys as transformers 4.4x did."""
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    values["transformers_version"] = "4.46.0"


def load_reference(folder: Path, dtype: str = "float32") -> Any:
    """Load the folder with transformers, for inference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def reference_generate(
    folder: Path, prompts: Sequence[Sequence[int]], n: int, *, dtype: str = "float32"
) -> list[list[int]]:
    """Greedy answers of ``transformers`` generate: ``n`` tokens each, no end of sequence."""
    model = load_reference(folder, dtype)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=n, eos_token_id=None, pad_token_id=0
    )
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(ids, attention_mask=torch.ones_like(ids))
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def reference_logprobs(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return log-softmax of the logits at every position, float32 ``[len(token_ids), vocab]``."""
    with torch.inference_mode():
        logits = load_reference(folder)(torch.tensor([list(token_ids)])).logits[0]
    return logits.float().log_softmax(-1)
