"""A model's KV from its config.json, in each form that it is written in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.planner.model_kv import folder_shape
from shared.model_folder import ModelFolder

SIZES = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "config",
    [
        {**SIZES, "dtype": "float32"},
        {**SIZES, "torch_dtype": "torch.float32"},
        {"dtype": "float32", "text_config": SIZES},
        {"torch_dtype": "float32", "text_config": {**SIZES, "dtype": None}},
        {"dtype": "bfloat16", "text_config": {**SIZES, "dtype": "float32"}},
    ],
)
def test_where_a_config_says_its_dtype(config: dict[str, Any], tmp_path: Path) -> None:
    """By either name, in its part about text or outside of it; that part counts first."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder_shape(ModelFolder(tmp_path)).bytes_per_element == 4.0
