"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers if asked for."""

from __future__ import annotations

from shared.engine.models.config import ConfigReader, ModelConfig, read_common

_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_config(reader: ConfigReader) -> ModelConfig:
    return read_common(
        reader,
        architecture="Qwen2ForCausalLM",
        max_len=32_768,
        num_kv_heads=32,
        qkv_bias=True,
        windows=read_windows(reader),
    )


def read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Return the window of each layer: ``layer_types``, else layers from ``max_window_layers`` on.

    Without ``use_sliding_window`` no layer has one, whatever ``sliding_window`` says.
    """
    num_layers = reader.num_layers()
    window = reader.window() if reader.flag("use_sliding_window", False) else None
    if not reader.has("layer_types"):
        first = reader.index("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = reader.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.error(f"layer_types must list {num_layers} layers")
    windows: list[int | None] = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error(f"layer_types: {kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            raise reader.error("layer_types has sliding_attention but there is no sliding_window")
        windows.append(window if kind == "sliding_attention" else None)
    return tuple(windows)
