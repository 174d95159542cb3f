"""The shape of a model's KV from its folder's config.json, or from the list of published ones."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from services.planner.core.kv_size import PUBLISHED, KvShape
from shared.engine.models.registry import read_model_config
from shared.errors import InvalidRequest, ModelError
from shared.model_folder import CONFIG_FILES, ModelFolder, resolve_model

_DTYPE_BYTES: Final = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0}

_EXPERTS: Final = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})


def kv_shape(name: str) -> KvShape:
    """Return the shape of a folder, of ``demo``, of a hub name, or of a published model.

    Raises ModelError, InvalidRequest: neither; the message lists the known ones.
    """
    if name.lower() in PUBLISHED:
        return PUBLISHED[name.lower()]
    try:
        folder = ModelFolder(resolve_model(name, CONFIG_FILES))
    except ModelError as error:
        if "/" in name:
            raise
        raise InvalidRequest(
            f"no model {name!r}: give a folder that holds config.json, demo, a hub name (org/name) "
            f"or one of {', '.join(PUBLISHED)}"
        ) from error
    return folder_shape(folder)


def folder_shape(folder: ModelFolder) -> KvShape:
    """Return what config.json says. Raises ModelError: a number is missing or makes no sense."""
    config = folder.text_config

    def whole(*names: str) -> int:
        for name in names:
            value: Any = config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(
                    f"{folder.path}/config.json: {name} must be a positive integer, not {value!r}"
                )
            return value
        raise ModelError(f"{folder.path}/config.json says no {' or '.join(names)}")

    heads = whole("num_attention_heads", "n_head")
    hidden = whole("hidden_size", "n_embd")
    latent = 0
    if config.get("kv_lora_rank"):
        latent = whole("kv_lora_rank") + whole("qk_rope_head_dim")
    family = None
    with suppress(ModelError):  # our engine does not run it
        family = read_model_config(folder)  # with the family's defaults
    # transformers 4 calls it torch_dtype; beside a text_config it may stand outside of it.
    parts = (config, folder.config)
    dtype = next((found for it in parts if (found := it.get("dtype") or it.get("torch_dtype"))), "")
    num_layers = whole("num_hidden_layers", "n_layer")
    if family is not None:
        head_dim, num_kv_heads = family.head_dim, family.num_kv_heads
    else:
        has_kv_heads = config.get("num_key_value_heads") is not None
        num_kv_heads = whole("num_key_value_heads") if has_kv_heads else heads
        head_dim = whole("head_dim") if config.get("head_dim") is not None else hidden // heads
    num_weights = 0.0
    # Only of the family whose layers are these products: gated, dense, without a latent.
    has_known_layers = "intermediate_size" in config and "vocab_size" in config
    if has_known_layers and not latent and not _EXPERTS & config.keys():
        # Queries and output, keys and values; then gate, up and down.
        layer = hidden * head_dim * 2 * (heads + num_kv_heads) + 3 * hidden * whole(
            "intermediate_size"
        )
        tied = 1 if config.get("tie_word_embeddings") else 2
        num_weights = float(num_layers * layer + tied * whole("vocab_size") * hidden)
    return KvShape(
        name=folder.name,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        bytes_per_element=_DTYPE_BYTES.get(str(dtype).removeprefix("torch."), 2.0),
        latent=latent,
        num_weights=num_weights,
    )
