"""Greedy tokens and logprobs equal those of transformers, for every family and way of batching."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.engine.torch_engine import TorchEngine
from tests.support.checkpoints import (
    SHAPES,
    load_reference,
    reference_generate,
    reference_logprobs,
)
from tests.support.engine_driver import Driver, greedy
from tests.support.native import needs_native
from tests.support.tiers import few

pytestmark = pytest.mark.torch

NUM_NEW = 12
BLOCK_SIZES = (1, 5, 16, 32)

every_shape = pytest.mark.parametrize(
    "shape", few(SHAPES, "llama-gqa2", "mistral-window", "qwen2-tied", "qwen3-bias-mixed-windows")
)


def prompts_for(shape: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return random prompts, the same ones for the same shape."""
    rng = random.Random(shape)
    vocab = SHAPES[shape].vocab
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def expected(folder_of: Callable[..., Path]) -> Callable[[str], tuple[list, list]]:
    """Return (prompts, transformers' answers) of a shape; computed once."""
    known: dict[str, tuple[list, list]] = {}

    def answers(shape: str) -> tuple[list, list]:
        if shape not in known:
            prompts = prompts_for(shape, (1, 2, 16, 17, 61, 140, 301))
            known[shape] = prompts, reference_generate(folder_of(shape), prompts, NUM_NEW)
        return known[shape]

    return answers


@pytest.fixture(params=["auto", "torch"])
def engine_of(
    request: pytest.FixtureRequest, engine_of: Callable[..., TorchEngine]
) -> Callable[..., TorchEngine]:
    """Load a shape on the kernels that a CPU takes by itself, and on torch's."""
    return functools.partial(engine_of, kernels=request.param)


@every_shape
def test_alone(shape: str, engine_of: Callable[..., TorchEngine], expected: Callable) -> None:
    """A prompt computed alone and at once is answered as transformers answers it."""
    prompts, want = expected(shape)
    driver = Driver(engine_of(shape))
    assert [driver.run_alone(prompt, greedy(NUM_NEW)).output for prompt in prompts] == want


@every_shape
def test_chunked(shape: str, engine_of: Callable[..., TorchEngine], expected: Callable) -> None:
    """Chunks of any size change nothing."""
    prompts, want = expected(shape)
    driver = Driver(engine_of(shape))
    for prompt, answer in zip(prompts, want, strict=True):
        for chunk in (1, 19) if len(prompt) < 70 else (64,):
            assert driver.run_alone(prompt, greedy(NUM_NEW), chunk=chunk).output == answer


@every_shape
def test_mixed(shape: str, engine_of: Callable[..., TorchEngine], expected: Callable) -> None:
    """Chunks and single tokens of many sequences in one step do not disturb each other."""
    prompts, want = expected(shape)
    rng = random.Random(shape)
    block_size = rng.choice(BLOCK_SIZES)
    engine = engine_of(shape, block_size=block_size, num_blocks=1400 // block_size)
    params = [greedy(NUM_NEW)] * len(prompts)
    for seed in range(2):
        done = Driver(engine, seed).run_mixed(prompts, params, max_chunk=rng.choice((8, 48, 400)))
        assert [sequence.output for sequence in done] == want


@pytest.mark.parametrize("shape", ["llama-llama3-rope", "mistral-window", "qwen3-own-head-dim"])
def test_long_prompt(
    shape: str, engine_of: Callable[..., TorchEngine], folder_of: Callable[..., Path]
) -> None:
    """1,500 tokens in chunks of 256, beside short ones."""
    prompts = prompts_for(shape, (1500, 30, 7))
    want = reference_generate(folder_of(shape), prompts, NUM_NEW)
    done = Driver(engine_of(shape)).run_mixed(prompts, [greedy(NUM_NEW)] * 3, max_chunk=256)
    assert [sequence.output for sequence in done] == want


@every_shape
def test_logprobs(
    shape: str, engine_of: Callable[..., TorchEngine], folder_of: Callable[..., Path]
) -> None:
    """Logprobs of prompt and answer are within 1e-4 of transformers' log-softmax, in its order."""
    (prompt,) = prompts_for(shape, (150,))
    driver = Driver(engine_of(shape))
    params = greedy(6, logprobs=4, prompt_logprobs=3)
    sequence = driver.run_alone(prompt, params, chunk=61)
    want = reference_logprobs(folder_of(shape), sequence.tokens)
    entries = [entry for part in sequence.prompt_results for entry in part.prompt_logprobs]
    assert len(entries) == len(prompt) - 1
    entries += [result.logprobs for result in sequence.results]
    for position, entry in enumerate(entries):
        row = want[position]
        assert entry.logprob == pytest.approx(row[sequence.tokens[position + 1]].item(), abs=1e-4)
        best = row.topk(len(entry.top))
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "shape", ["llama-gqa2", "llama-llama3-rope", "mistral-window", "qwen2-window-upper"]
)
def test_config_of_transformers_4(shape: str, folder_of: Callable[..., Path]) -> None:
    """The older form of config.json is the same model, with the same fingerprint."""
    prompts = prompts_for(shape, (90,))
    new, old = folder_of(shape), folder_of(shape, form=4)
    assert "rope_theta" in (old / "config.json").read_text()
    assert "rope_parameters" in (new / "config.json").read_text()
    want = reference_generate(new, prompts, NUM_NEW)
    engine = TorchEngine.load(old, num_blocks=20)
    assert [Driver(engine).run_alone(prompts[0], greedy(NUM_NEW)).output] == want
    assert engine.spec.fingerprint == TorchEngine.load(new, num_blocks=1).spec.fingerprint


def test_sharded(folder_of: Callable[..., Path]) -> None:
    """Weights in many files are the same weights."""
    shape = "llama-gqa4-biases"
    prompts = prompts_for(shape, (20,))
    folder = folder_of(shape, shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    want = reference_generate(folder_of(shape), prompts, NUM_NEW)
    engine = TorchEngine.load(folder, num_blocks=20)
    assert [Driver(engine).run_alone(prompts[0], greedy(NUM_NEW)).output] == want


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [("bfloat16", "torch"), ("float16", "torch"), ("bfloat16", "native"), ("bfloat16", "avx2")],
)
@every_shape
def test_half_precision(
    shape: str, dtype: str, kernels: str, folder_of: Callable[..., Path]
) -> None:
    """A folder in 16 bits runs in 16 bits, as close to float32 as transformers in 16 bits is."""
    folder = folder_of(shape, dtype=dtype)
    if kernels != "torch":
        needs_native()
    engine = TorchEngine.load(folder, num_blocks=20, dtype=dtype, kernels=kernels)
    assert {weight.dtype for weight in engine.forward.weights} == {getattr(torch, dtype)}
    assert engine.layout.dtype == engine.spec.dtype == dtype
    (prompt,) = prompts_for(shape, (100,))
    sequence = Driver(engine).run_alone(prompt, greedy(1, prompt_logprobs=0), chunk=30)
    ours = torch.tensor(
        [entry.logprob for part in sequence.prompt_results for entry in part.prompt_logprobs]
    )
    targets = torch.tensor(prompt[1:])[:, None]

    def of_transformers(model_dtype: str) -> torch.Tensor:
        model = load_reference(folder, model_dtype)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, targets)[:, 0]

    exact = of_transformers("float32")
    theirs = (of_transformers(dtype) - exact).abs().mean()
    assert 0 < (ours - exact).abs().mean() < 1.5 * theirs


def test_asked_dtype_wins(folder_of: Callable[..., Path]) -> None:
    """A float32 folder can be served in bfloat16, and back."""
    narrow = TorchEngine.load(folder_of("llama-gqa2"), num_blocks=1, dtype="bfloat16")
    assert {weight.dtype for weight in narrow.forward.weights} == {torch.bfloat16}
    folder = folder_of("llama-gqa2", dtype="bfloat16")
    wide = TorchEngine.load(folder, num_blocks=1, dtype="float32")
    assert {weight.dtype for weight in wide.forward.weights} == {torch.float32}
