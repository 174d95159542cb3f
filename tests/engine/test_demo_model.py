"""The bundled model loads and computes what transformers computes from it."""

from __future__ import annotations

import random

import pytest

from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER, ModelFolder
from tests.support.checkpoints import reference_generate
from tests.support.engine_driver import Driver, greedy

pytestmark = pytest.mark.torch


def test_demo_model() -> None:
    """It is served in bfloat16, and in float32 its greedy tokens are those of transformers."""
    assert TorchEngine.load(DEMO_FOLDER, num_blocks=1).spec.dtype == "bfloat16"
    engine = TorchEngine.load(DEMO_FOLDER, num_blocks=100, dtype="float32")
    rng = random.Random(0)
    prompts = [[rng.randrange(engine.spec.vocab_size) for _ in range(n)] for n in (1, 60, 400)]
    driver = Driver(engine)
    got = [driver.run_alone(prompt, greedy(16), chunk=128).output for prompt in prompts]
    assert got == reference_generate(DEMO_FOLDER, prompts, 16)


def test_demo_folder() -> None:
    """Everything the gateway reads is there."""
    folder = ModelFolder(DEMO_FOLDER)
    assert folder.tokenizer_path.is_file()
    assert folder.chat_template
    assert folder.eos_token_ids
