"""Llama 2, 3, 3.1, 3.2: the plain decoder, with optional biases."""

from __future__ import annotations

from shared.engine.models.config import ConfigReader, ModelConfig, read_common


def read_config(reader: ConfigReader) -> ModelConfig:
    attention_bias = reader.flag("attention_bias", False)
    return read_common(
        reader,
        architecture="LlamaForCausalLM",
        max_len=2048,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
    )
