"""Which reader belongs to which architecture: the one place to add a family.

A family is a function from config.json to a ModelConfig; the decoder itself is the same for all
(``decoder.py``). To add one, write its file and name it here.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.models import llama, mistral, qwen2, qwen3
from shared.engine.models.config import ConfigReader, ModelConfig
from shared.model_folder import ModelFolder

FAMILIES: dict[str, Callable[[ConfigReader], ModelConfig]] = {
    "LlamaForCausalLM": llama.read_config,
    "MistralForCausalLM": mistral.read_config,
    "Qwen2ForCausalLM": qwen2.read_config,
    "Qwen3ForCausalLM": qwen3.read_config,
}

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_model_config(folder: ModelFolder) -> ModelConfig:
    """Read a folder's config by its architecture (``model_type`` if it names none).

    Raises ModelError: the architecture is not supported, or a key is missing, wrong or unsupported.
    """
    reader = ConfigReader(folder.config, folder.path / "config.json")
    names = folder.config.get("architectures")
    if isinstance(names, list) and names:
        name = names[0]
    else:
        name = _BY_MODEL_TYPE.get(str(folder.config.get("model_type")))
        name = name or f"model_type {folder.config.get('model_type')!r}"
    read = FAMILIES.get(name) if isinstance(name, str) else None
    if read is None:
        known = ", ".join(sorted(FAMILIES))
        raise reader.error(f"architecture {name} is not supported (supported: {known})")
    return read(reader)
