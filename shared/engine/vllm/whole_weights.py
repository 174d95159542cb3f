"""vLLM loads the files that a fingerprint is of, and misses whatever they lack.

By itself it reads every safetensors file of a folder, and the last of two with one tensor counts;
and of q, k and v, of gate and up, of all experts of a layer, which are one parameter there, it asks
for none: what is not in the files is what memory had, and answers are noise. Of a quantised model
it asks for nothing at all.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from shared.engine.models.weights import INDEX_FILE, find_files
from shared.model_folder import ModelFolder

_UNQUANTISED = (torch.float32, torch.bfloat16, torch.float16)
_LONG = 32
"""Codes in a row that are not the highest by chance."""

_create_model, _load_weights = DefaultModelLoader.create_model, DefaultModelLoader.load_weights


def take_over() -> None:
    """Have this process's vLLM load so."""
    DefaultModelLoader._prepare_weights = _our_files
    DefaultModelLoader.create_model = _create_unwritten
    DefaultModelLoader.load_weights = _load_whole


def _our_files(_: Any, folder: str, *__: Any) -> tuple[str, list[str], bool, str]:
    names = [path.name for path in find_files(ModelFolder(folder))]
    return folder, [os.path.join(folder, name) for name in names], True, INDEX_FILE


def _create_unwritten(loader: Any, *args: Any, **named: Any) -> torch.nn.Module:
    """Make a model whose unwritten numbers are NaN, and codes the highest, as torch makes them for
    who wants the same result each time; norms, which begin as ones, too."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = _create_model(loader, *args, **named)
    finally:
        torch.set_deterministic_debug_mode(before)
    for module in model.modules():
        if not hasattr(module, "quant_method"):  # scales of KV may keep what they begin as
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data.fill_(torch.nan)
    return model


def _load_whole(loader: Any, model: torch.nn.Module, model_config: Any) -> None:
    _load_weights(loader, model, model_config)
    for name, parameter in model.named_parameters():
        if parameter.numel() and _has_unwritten(name, parameter.detach()):
            raise ValueError(f"the checkpoint has not all of {name}, or NaN in it")


def _has_unwritten(name: str, codes: torch.Tensor) -> bool:
    """Whether there is a NaN, or of codes a whole row or column that is the highest one."""
    if codes.dtype in _UNQUANTISED:
        return bool(codes.min().isnan())
    if not name.endswith(("weight", "weight_packed")):
        return False  # indices and zero points need not be in the files
    if codes.dtype.is_floating_point:
        codes = codes.view(torch.int8)  # whose highest is NaN
    highest = torch.iinfo(codes.dtype).max
    axes = [axis for axis in (-1, -2) if codes.dim() > 1 and codes.shape[axis] >= _LONG]
    return any(bool((codes.amin(axis) == highest).any()) for axis in axes)
