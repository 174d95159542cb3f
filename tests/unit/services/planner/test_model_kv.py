"""A model's KV from its config.json, in each form that it is written in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.planner.model_kv import folder_shape, kv_shape
from shared.model_folder import ModelFolder
from tests.support.fake_hub import FakeHub

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


@pytest.mark.parametrize(
    ("model_type", "config", "kv_heads", "head_dim"),
    [
        ("mistral", {}, 8, 16),
        ("mistral", {"num_key_value_heads": None}, 32, 16),
        ("qwen3", {}, 32, 128),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 64}, 4, 64),
        ("of-nobody", {}, 32, 16),
    ],
)
def test_what_a_config_leaves_out_is_its_familys(
    model_type: str, config: dict[str, Any], kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    """As the engine reads it; of a family that it does not run, as many heads of KV as of
    queries."""
    sizes = {"num_attention_heads": 32, "hidden_size": 512, "num_hidden_layers": 2}
    known = {"model_type": model_type, "vocab_size": 99, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **known, **config}))
    shape = folder_shape(ModelFolder(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim) == (kv_heads, head_dim)


def test_a_hub_name_brings_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its weights, of which nothing is asked; and it keeps its name, for a commit's says
    nothing."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SIZES))
    hub = FakeHub(snapshot, monkeypatch)
    assert kv_shape("org/name").name == "org/name"
    assert hub.asked == [("org/name", ["config.json"])]
