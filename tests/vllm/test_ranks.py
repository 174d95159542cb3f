"""Tensor parallel, also unequal: the wire has all heads, so each end may have ranks of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.engine_driver import Driver, Running, greedy
from tests.vllm.conftest import RUNNERS, EngineOf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_NEW = 10
PARAMS = (
    greedy(NUM_NEW),
    greedy(NUM_NEW, temperature=0.8, top_p=0.9, seed=4, presence_penalty=0.3),
)


def prompts() -> list[list[int]]:
    source = random.Random(2)
    return [[source.randrange(3, 500) for _ in range(length)] for length in (5, 33, 100, 200)]


def begun(driver: Driver, prompt: list[int], params: object) -> tuple[Running, list[int]]:
    """A sequence after its first token, and the layers that were told meanwhile."""
    sequence = driver.start(prompt, params)  # type: ignore[arg-type]
    told: list[int] = []
    row = sequence.row(1 << 30)
    sequence.commit(row, driver.engine.step([row], told.append)[0])
    return sequence, told


@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        *(("llama", 2, 1), ("llama", 1, 2), ("llama", 2, 2)),
        pytest.param("llama_4_heads", 4, 2, marks=pytest.mark.nightly),
    ],
)
def test_kv_of_some_ranks_goes_on_in_others(
    family: str, source: int, target: int, engine_of: EngineOf
) -> None:
    """Every frame's bytes come back equal, layers are told in order, and tokens are those of one
    rank."""
    one = Driver(engine_of(family))
    ours, theirs = (Driver(engine_of(family, ranks=ranks)) for ranks in (source, target))
    layout = one.engine.layout
    assert layout == ours.engine.layout == theirs.engine.layout
    for prompt in prompts():
        for params in PARAMS:
            want = one.run_alone(prompt, params).output
            first, told = begun(ours, prompt, params)
            assert told == list(range(layout.num_layers))
            moved = theirs.start(prompt, params)
            for layer in range(layout.num_layers):
                at = (0, len(prompt), layer, layer + 1)
                frame, back = (
                    one.engine.new_buffer(layout.token_layer_bytes * len(prompt)) for _ in range(2)
                )
                ours.engine.gather(first.block_table, *at, frame)
                theirs.engine.scatter(moved.block_table, *at, frame)
                theirs.engine.gather(moved.block_table, *at, back)
                assert np.count_nonzero(frame)
                assert np.array_equal(frame, back)
            moved.num_computed, moved.output = len(prompt), list(first.output)
            while not moved.is_done:
                row = moved.row(1)
                moved.commit(row, theirs.engine.step([row])[0])
            assert moved.output == want
            ours.finish(first)
            theirs.finish(moved)


@pytest.mark.parametrize("of_ranks", RUNNERS)
def test_ranks_say_what_one_rank_says(of_ranks: str, engine_of: EngineOf) -> None:
    """In chunks and beside others, logprobs as well, over either of vLLM's model runners."""
    one = Driver(engine_of("llama"))
    two = Driver(engine_of("llama", ranks=2, runner=of_ranks), seed=1)
    params = greedy(NUM_NEW, temperature=0.8, seed=4, logprobs=2, prompt_logprobs=1)
    want = [one.run_alone(prompt, params) for prompt in prompts()]
    got = two.run_mixed(prompts(), [params] * len(want), max_chunk=70)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.output == theirs.output
        assert [one.logprobs.logprob for one in ours.results if one.logprobs] == pytest.approx(
            [one.logprobs.logprob for one in theirs.results if one.logprobs], abs=1e-3
        )
