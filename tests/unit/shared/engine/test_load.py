"""What every engine's load finds out before anything slow begins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.config import PrefillConfig
from shared.engine.load import load_engine
from shared.errors import ModelError
from shared.model_folder import DEMO_FOLDER


@pytest.mark.parametrize("engine", ["torch", "vllm", "fake", "a.module:load"])
def test_a_damaged_tokenizer_ends_the_start_whatever_computes(tmp_path: Path, engine: str) -> None:
    """A worker took requests, and ended each answer that had to follow a grammar with an error."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer: EOF"):
        load_engine(PrefillConfig(model=str(folder), engine=engine))
