"""The bundled model remembers through the mesh what it remembers in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from services.gateway.text.text_model import TextModel
from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER, ModelFolder
from shared.request import SamplingParams
from tests.support.engine_driver import Driver
from tests.support.real_mesh import real_mesh
from tools.demo_model.data import RecallPrompt, recall_prompt

pytestmark = [pytest.mark.torch, pytest.mark.ucx]

NUM_NEW = 24
"""More than the longest answer has tokens."""

ACCURACY = 0.95


@pytest.fixture(scope="module")
def demo_text() -> Iterator[TextModel]:
    """The bundled model's tokenizer."""
    text = TextModel.load(ModelFolder(DEMO_FOLDER))
    yield text
    text.close()


def demo_engine(block_size: int, num_tokens: int) -> TorchEngine:
    """The bundled model as it is served, but in float32, in which no batch changes a token."""
    return TorchEngine.load(
        DEMO_FOLDER,
        dtype="float32",
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        num_threads=1,
    )


async def answers_of_one_process(text: TextModel, prompts: Sequence[RecallPrompt]) -> list[str]:
    """Render, tokenize, generate and detokenize one after another, without any mesh."""
    engine = demo_engine(16, 4096)
    ends = engine.spec.eos_token_ids
    driver = Driver(engine)
    answers: list[str] = []
    for prompt in prompts:
        rendered = await text.render(prompt.messages)
        ids = await text.encode(rendered, add_special_tokens=False)
        sequence = driver.start(ids, SamplingParams(max_tokens=NUM_NEW))
        while not sequence.is_done and ends.isdisjoint(sequence.output):
            row = sequence.row(len(ids))
            sequence.commit(row, engine.step([row])[0])
        driver.finish(sequence)
        answers += await text.decode_all([sequence.output], skip_special=True)
    engine.close()
    return answers


@pytest.mark.parametrize("num_prompts", [40, pytest.param(200, marks=pytest.mark.nightly)])
async def test_recall_is_that_of_one_process(num_prompts: int, demo_text: TextModel) -> None:
    """Codes amid prompts of 60 to 1,000 tokens: each answer is the one-process answer, character
    by character, and at least 95 in 100 are right."""
    lengths = [60 + 940 * index // (num_prompts - 1) for index in range(num_prompts)]
    prompts = [
        recall_prompt(7_000_000 + index, 10 if length > 128 else 3, length)
        for index, length in enumerate(lengths)
    ]
    want = await answers_of_one_process(demo_text, prompts)
    engines = demo_engine(16, 1 << 15), demo_engine(24, 1 << 15)
    async with real_mesh(*engines, demo_text, prefill={"token_budget": 512}) as mesh:
        answers = await mesh.ask_all(
            [prompt.messages[0]["content"] for prompt in prompts], NUM_NEW, at_once=8
        )
    got = [answer.text for answer in answers]
    assert got == want
    right = sum(text == prompt.expected_reply for text, prompt in zip(got, prompts, strict=True))
    print(f"recall through the mesh: {right} of {num_prompts}")
    assert right >= ACCURACY * num_prompts
