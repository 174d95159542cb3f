"""Qwen3 (dense): a head size of its own, and RMS norms on q and k before the rotary embedding."""

from __future__ import annotations

from shared.engine.models.config import ConfigReader, ModelConfig, read_common
from shared.engine.models.qwen2 import read_windows

_DEFAULT_HEAD_DIM = 128


def read_config(reader: ConfigReader) -> ModelConfig:
    attention_bias = reader.flag("attention_bias", False)
    return read_common(
        reader,
        architecture="Qwen3ForCausalLM",
        max_len=32_768,
        num_kv_heads=32,
        head_dim=_DEFAULT_HEAD_DIM,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        windows=read_windows(reader),
    )
