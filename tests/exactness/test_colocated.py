"""A colocated worker with real weights gives what transformers gives: prompts in chunks amid other
answers' tokens, on cached prefixes, after preemption, with the logprobs of prompts.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from services.gateway.text.text_model import TextModel
from shared.engine.torch_engine import TorchEngine
from tests.exactness.reference import NUM_NEW, NUM_TOP, Reference, Tally
from tests.support.checkpoint_folders import FolderOf
from tests.support.checkpoints import SHAPES
from tests.support.real_mesh import RealMesh, real_mesh
from tests.support.tiers import in_turn

pytestmark = [pytest.mark.torch, pytest.mark.ucx]

BLOCK_SIZE = 16


def half_of_the_shapes(turn: int) -> pytest.MarkDecorator:
    """The others are nightly."""
    return pytest.mark.parametrize("shape", in_turn(SHAPES, "llama-gqa2", of=2, turn=turn))


@contextlib.asynccontextmanager
async def a_mesh(
    folder_of: FolderOf, shape: str, text: TextModel, num_blocks: int, **decode: Any
) -> AsyncGenerator[RealMesh]:
    engine = TorchEngine.load(
        folder_of(shape, 5), num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=1
    )
    try:
        async with real_mesh(None, engine, text, decode=decode) as mesh:
            yield mesh
    finally:
        engine.close()


def prompts_of(shape: str) -> list[list[int]]:
    source = random.Random(shape)
    lengths = [1, 700, *(source.randint(1, 300) for _ in range(6))]
    return [[source.randrange(SHAPES[shape].vocab) for _ in range(length)] for length in lengths]


async def compare(mesh: RealMesh, reference: Reference, prompts: Sequence[list[int]]) -> Tally:
    """Ask for all at once and compare every token and logprob."""
    tally = Tally()
    answers = await mesh.ask_all(prompts, NUM_NEW, ignore_eos=True, logprobs=NUM_TOP)
    for prompt, answer in zip(prompts, answers, strict=True):
        tally.take(answer, reference.answer(prompt), prompt)
        assert answer.receipt["mode"] == "colocated"
        assert not answer.receipt["transfer_bytes"]
    return tally


@pytest.mark.parametrize("budget", [{"token_budget": 50}, {"tbt_target_s": 1e-6}])
@half_of_the_shapes(0)
async def test_chunks_amid_answers(
    shape: str,
    budget: dict[str, Any],
    folder_of: FolderOf,
    reference_of: Callable[[str], Reference],
    tiny_text: TextModel,
) -> None:
    """Bound by tokens or by time (chunks as small as they get); asked again, the same from cached
    prefixes."""
    reference, prompts = reference_of(shape), prompts_of(shape)
    for prompt in prompts:
        reference.answer(prompt)  # before the mesh, for the loop would stand still meanwhile
    async with a_mesh(folder_of, shape, tiny_text, 400, **budget) as mesh:
        (await compare(mesh, reference, prompts)).assert_ties_are_rare()
        statistics = mesh.decode.scheduler.statistics()
        assert statistics.num_steps > NUM_NEW
        await compare(mesh, reference, prompts)
        assert mesh.decode.pool.statistics().num_hit_tokens > 0


@half_of_the_shapes(1)
async def test_after_preemption(
    shape: str,
    folder_of: FolderOf,
    reference_of: Callable[[str], Reference],
    tiny_text: TextModel,
) -> None:
    """Answers that lose their blocks to older ones are computed anew, and go on the same."""
    reference = reference_of(shape)
    source = random.Random(shape)
    prompts = [[source.randrange(SHAPES[shape].vocab) for _ in range(60)] for _ in range(8)]
    for prompt in prompts:
        reference.answer(prompt)
    # Four blocks a prompt and two to grow into: the pool holds all prompts and few answers.
    async with a_mesh(
        folder_of, shape, tiny_text, 34, token_budget=100, cache_prefixes=False
    ) as mesh:
        # Small models are quick: on a busy machine an answer may end before the next prompt comes.
        for _ in range(10):
            await compare(mesh, reference, prompts)
            if mesh.decode.scheduler.statistics().num_preemptions:
                break
        assert mesh.decode.scheduler.statistics().num_preemptions > 0


async def test_prompt_logprobs(
    folder_of: FolderOf, reference_of: Callable[[str], Reference], tiny_text: TextModel
) -> None:
    """They come with the first token, computed in chunks, as transformers has them."""
    shape = next(iter(SHAPES))
    reference, tally = reference_of(shape), Tally()
    source = random.Random(3)
    prompt = [source.randrange(SHAPES[shape].vocab) for _ in range(333)]
    async with a_mesh(folder_of, shape, tiny_text, 100, token_budget=100) as mesh:
        answer = await mesh.ask(prompt, 2, ignore_eos=True, prompt_logprobs=NUM_TOP)
    want = reference.prompt_logprobs(prompt)
    first, *rest = answer.prompt_logprobs
    assert math.isnan(first.logprob)
    assert len(rest) == len(prompt) - 1
    for index, entry in enumerate(rest):
        about = f"prompt token {index + 1}"
        tally.compare_entry(prompt[index + 1], entry.logprob, entry.top, want[index], about)
