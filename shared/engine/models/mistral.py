"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from shared.engine.models.config import ConfigReader, ModelConfig, read_common


def read_config(reader: ConfigReader) -> ModelConfig:
    if reader.has("layer_types"):
        raise reader.error("layer_types is not supported for MistralForCausalLM")
    return read_common(
        reader,
        architecture="MistralForCausalLM",
        max_len=131_072,
        num_kv_heads=8,
        windows=(reader.window(),) * reader.num_layers(),
    )
