"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from shared.engine.models.config import ConfigReader, ModelConfig, read_common

_DEFAULT_WINDOW = 4096


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read a MistralForCausalLM config: ``sliding_window: null`` is none, a missing key 4,096."""
    if reader.has("layer_types"):
        raise reader.error("layer_types is not supported for MistralForCausalLM")
    window = (
        reader.count("sliding_window", _DEFAULT_WINDOW)
        if reader.has("sliding_window") or "sliding_window" not in reader.values
        else None
    )
    num_layers = reader.count("num_hidden_layers")
    return read_common(
        reader,
        architecture="MistralForCausalLM",
        max_len=131_072,
        num_kv_heads=8,
        windows=(window,) * num_layers,
    )
