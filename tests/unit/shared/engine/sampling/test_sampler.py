"""Sampling: each rule against a plain reimplementation, the draw against its distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shared.engine.sampling.guides import Masks  # noqa: E402
from shared.engine.sampling.sampler import (  # noqa: E402
    deny,
    is_plain_greedy,
    logprobs_of,
    sample,
)
from shared.messages.columns import pack_u32  # noqa: E402
from shared.request import SamplingParams  # noqa: E402
from shared.step import RowResult, SampleSpec  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB = 40


def some_logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def a_spec(
    index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    **params: object,
) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), index, prompt, output)  # type: ignore[arg-type]


def run(
    logits: torch.Tensor, *specs: SampleSpec, eos: frozenset[int] = frozenset()
) -> list[RowResult]:
    return sample(logits.clone(), specs, eos_token_ids=eos)


def best(logits: torch.Tensor, spec: SampleSpec, eos: frozenset[int] = frozenset()) -> int:
    return run(logits, spec, eos=eos)[0].token_id


def support(logits: torch.Tensor, num_draws: int = 4000, **params: object) -> set[int]:
    """Every token that comes up at temperature 1."""
    specs = [a_spec(index, temperature=1.0, seed=5, **params) for index in range(num_draws)]
    return {one.token_id for one in run(logits.expand(num_draws, -1), *specs)}


def test_greedy_takes_the_best() -> None:
    """Temperature 0, or one too small to divide by, is argmax."""
    logits = some_logits(3)
    specs = [a_spec(), a_spec(temperature=1e-6), a_spec(temperature=1e-4, seed=3)]
    assert [one.token_id for one in run(logits, *specs)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Frequencies over 20,000 indices match softmax(logits / temperature)."""
    count = 20_000
    logits = some_logits(vocab=12)
    specs = [a_spec(index, temperature=temperature, seed=11) for index in range(count)]
    drawn = torch.tensor([one.token_id for one in run(logits.expand(count, -1), *specs)])
    observed = torch.bincount(drawn, minlength=12).double()
    expected = (logits[0].double() / temperature).softmax(-1) * count
    is_common = expected >= 5
    parts = ((observed - expected) ** 2 / expected)[is_common]
    # 11 degrees of freedom at most: exceeded by chance once in 10,000.
    assert parts.sum() < 37
    assert observed[~is_common].sum() <= 3 * expected[~is_common].sum() + 10


def test_row_is_independent_of_its_batch() -> None:
    """Any mix and order of rows gives each row the token it gets alone."""
    rng = random.Random(2)
    logits = some_logits(24, seed=1)
    specs = [
        a_spec(
            rng.randrange(50),
            prompt=[rng.randrange(VOCAB) for _ in range(8)],
            output=[rng.randrange(VOCAB) for _ in range(5)],
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 0, 3, 10]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([(), ((3, 2.5), (7, -100.0))]),
            min_tokens=rng.choice([0, 60]),
            stop_token_ids=(4,),
            allowed_token_ids=rng.choice([b"", pack_u32([1, 4, 5, 17])]),
            bad_words=rng.choice([(), ((5,), (2, 3), (7, 7, 9))]),
            seed=rng.getrandbits(64),
            logprobs=rng.choice([None, 0, 3]),
        )
        for _ in range(24)
    ]
    eos = frozenset({1})
    alone = [run(logits[row : row + 1], spec, eos=eos)[0] for row, spec in enumerate(specs)]
    for _ in range(5):
        order = rng.sample(range(24), rng.randint(2, 24))
        together = run(logits[order], *(specs[row] for row in order), eos=eos)
        for row, one in zip(order, together, strict=True):
            assert one.token_id == alone[row].token_id
            assert (one.logprobs is None) == (alone[row].logprobs is None)
            if one.logprobs is not None and alone[row].logprobs is not None:
                assert one.logprobs.logprob == pytest.approx(alone[row].logprobs.logprob)
                assert [i for i, _ in one.logprobs.top] == [i for i, _ in alone[row].logprobs.top]


def test_token_depends_on_seed_and_index() -> None:
    """The same (seed, index) draws the same token; other seeds and other indices draw others."""
    logits = torch.zeros(1, 1000)
    draws = {
        (seed, index): best(logits, a_spec(index, temperature=1.0, seed=seed))
        for seed in range(10)
        for index in range(10)
    }
    again = {key: best(logits, a_spec(key[1], temperature=1.0, seed=key[0])) for key in draws}
    assert draws == again
    assert len(set(draws.values())) > 80


def test_small_noise_rarely_changes_a_draw() -> None:
    """Noise of the last bits, which batching causes, does not move draws, even among near ties."""
    count = 2000
    logits = some_logits().index_fill(1, torch.arange(0, VOCAB, 2), 3.0)
    noisy = logits + 1e-6 * some_logits(seed=9)
    specs = [a_spec(index, temperature=1.0, seed=1, top_p=0.99) for index in range(count)]
    first = run(logits.expand(count, -1), *specs)
    second = run(noisy.expand(count, -1), *specs)
    assert sum(a.token_id != b.token_id for a, b in zip(first, second, strict=True)) <= 2


@pytest.mark.parametrize("top_k", [1, 3, 39, 40, 1000])
def test_top_k(top_k: int) -> None:
    """Only the k best can come up, and a k beyond the vocabulary is no filter."""
    logits = some_logits() / 4
    assert support(logits, top_k=top_k) == set(logits[0].topk(min(top_k, VOCAB)).indices.tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.8, 0.999])
def test_top_p(top_p: float) -> None:
    """Only the smallest set of best tokens that reaches top_p can come up."""
    logits = some_logits() / 4
    probs, ids = logits[0].softmax(-1).sort(descending=True)
    kept = 1 + int((probs.cumsum(-1) < top_p).sum())
    assert support(logits, 20_000, top_p=top_p) == set(ids[:kept].tolist())


def test_top_p_looks_beyond_its_first_guess() -> None:
    """A flat distribution over a large vocabulary needs the full sort, and gets it."""
    vocab = 2500
    logits = torch.arange(vocab, dtype=torch.float32)[None] * 1e-4
    probs, ids = logits[0].double().softmax(-1).sort(descending=True)
    kept = set(ids[: 1 + int((probs.cumsum(-1) < 0.6).sum())].tolist())
    assert 1024 < len(kept) < vocab
    drawn = support(logits, 3000, top_p=0.6)
    assert drawn <= kept
    assert len(drawn) > len(kept) * 0.5


def test_min_p() -> None:
    """Tokens below min_p times the best probability cannot come up."""
    logits = some_logits() / 4
    probs = logits[0].softmax(-1)
    want = set((probs >= 0.5 * probs.max()).nonzero()[:, 0].tolist())
    assert support(logits, min_p=0.5) == want
    assert 1 < len(want) < VOCAB


def test_filters_compose_in_order() -> None:
    """min-p, then top-k, then top-p over what is left, renormalised."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05]]).log()
    assert support(logits, top_k=2, top_p=0.57) == {0}  # 0.4 / 0.7 reaches 0.57
    assert support(logits, top_k=2, top_p=0.58) == {0, 1}
    assert support(logits, min_p=0.4, top_k=4) == {0, 1, 2}


def test_ties_are_kept_together() -> None:
    """A border that falls among equal tokens keeps all of them."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert support(logits, top_k=2) == {0, 1, 2, 3}


def test_repetition_penalty() -> None:
    """As transformers: positive logits of prompt and output divided, negative multiplied, once."""
    logits = torch.tensor([[2.0, 1.8, -1.0, -1.1]])
    assert best(logits, a_spec(prompt=[0, 0], repetition_penalty=1.2)) == 1
    assert best(logits, a_spec(output=[0], repetition_penalty=1.2)) == 1
    assert best(logits, a_spec(prompt=[0, 0, 0], repetition_penalty=1.1)) == 0
    lower = logits - 3
    assert best(lower, a_spec(prompt=[0], output=[0], repetition_penalty=1.5)) == 1


def test_presence_and_frequency_penalties() -> None:
    """They look at the output only: presence once, frequency per occurrence."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert best(logits, a_spec(prompt=[0] * 9, presence_penalty=2.0, frequency_penalty=2.0)) == 0
    assert best(logits, a_spec(output=[0] * 9, presence_penalty=0.9)) == 0
    assert best(logits, a_spec(output=[0], presence_penalty=1.1)) == 1
    assert best(logits, a_spec(output=[0], frequency_penalty=0.6)) == 0
    assert best(logits, a_spec(output=[0, 0], frequency_penalty=0.6)) == 1
    assert best(logits, a_spec(output=[2, 2], frequency_penalty=-1.5)) == 2


def test_logit_bias() -> None:
    """Bias is added before the choice, also a greedy one; unknown ids are passed over."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert best(logits, a_spec(logit_bias=((2, 3.0), (99, 5.0)))) == 2
    assert best(logits, a_spec(logit_bias=((0, -100.0),))) == 1


def test_min_tokens() -> None:
    """No end-of-sequence or stop token before min_tokens; ignore_eos leaves the former alone."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    eos = frozenset({0})
    spec = a_spec(1, min_tokens=2, stop_token_ids=(1, 50))
    assert best(logits, spec, eos) == 2
    assert best(logits, replace(spec, index=2), eos) == 0
    ignoring = a_spec(1, min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    assert best(logits, ignoring, eos) == 0


def test_allowed_token_ids() -> None:
    """Nothing else is chosen, greedily or drawn, whatever bias and penalties say; ids beyond the
    vocabulary are passed over."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    allowed = {"allowed_token_ids": pack_u32([2, 3, 99])}
    assert best(logits, a_spec(**allowed)) == 2
    assert best(logits, a_spec(**allowed, logit_bias=((0, 100.0),))) == 2
    assert best(logits, a_spec(output=[2], presence_penalty=1.5, **allowed)) == 3
    assert support(logits, **allowed) == {2, 3}
    assert support(logits, top_k=1, **allowed) == {2}


def test_bad_words() -> None:
    """The last token of a sequence is not chosen where the answer ends with the rest of it; the
    prompt does not count."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    words = ((0,), (2, 3, 1))
    assert best(logits, a_spec(bad_words=words)) == 1
    assert best(logits, a_spec(bad_words=words, output=[2, 3])) == 2
    assert best(logits, a_spec(bad_words=words, output=[3])) == 1
    assert best(logits, a_spec(bad_words=words, prompt=[2, 3])) == 1
    assert support(logits, bad_words=words) == {1, 2, 3}


def test_where_all_allowed_tokens_are_forbidden_one_of_them_comes() -> None:
    """Something has to come next, and it is never a token that the client did not allow."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    spec = a_spec(allowed_token_ids=pack_u32([1, 2]), bad_words=((1,), (2,)))
    assert best(logits, spec) == 1
    early = a_spec(allowed_token_ids=pack_u32([2]), min_tokens=5)
    assert best(logits, early, frozenset({2})) == 2


@pytest.mark.parametrize("vocab", [40, 37])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_leaves_what_it_allows(vocab: int, temperature: float) -> None:
    """Guided rows among others, greedy and drawn, beside the same tokens asked for by a list."""
    logits = some_logits(6, vocab=vocab)
    specs = [a_spec(temperature=temperature, seed=row) for row in range(6)]
    chance = np.random.default_rng(1)
    allowed = [np.flatnonzero(chance.random(vocab) < 0.2) for _ in range(2)]
    bits = np.zeros((2, 8), np.uint8)
    for line, ids in enumerate(allowed):
        np.bitwise_or.at(bits[line], ids // 8, (1 << ids % 8).astype(np.uint8))
    masks = Masks([1, 4], bits, {})
    scores = logits.clone()
    guide = partial(deny, scores, masks)
    guided = sample(scores, specs, eos_token_ids=frozenset(), guide=guide)
    for row, ids in zip(masks.places, allowed, strict=True):
        params = replace(specs[row].params, allowed_token_ids=pack_u32(ids.tolist()))
        specs[row] = replace(specs[row], params=params)
    assert guided == run(logits, *specs)
    assert guided != run(logits, *[a_spec(temperature=temperature, seed=row) for row in range(6)])


def test_masks_keep_a_row_from_the_fast_path() -> None:
    """The most likely token alone is no answer where tokens are forbidden."""
    assert is_plain_greedy(a_spec())
    assert not is_plain_greedy(a_spec(bad_words=((1,),)))
    assert not is_plain_greedy(a_spec(allowed_token_ids=pack_u32([1])))


def test_logprobs_that_tie_are_told_by_id() -> None:
    """However many are asked for, here or by another row: 16 bits of logits tie often."""
    logits = torch.zeros(2, 3000)
    logits[:, 7] = 1.0
    for counts in ((1, 4), (4, 30), (30, 2)):
        specs = [a_spec(logprobs=count) for count in counts]
        for one, count in zip(run(logits, *specs), counts, strict=True):
            assert one.logprobs is not None
            ids = [token_id for token_id, _ in one.logprobs.top]
            assert ids == [7, *(it for it in range(count) if it != 7)][:count]


def test_logprobs_are_raw_and_ordered() -> None:
    """Reported logprobs are those of the model: no bias, penalty, temperature or filter in them."""
    logits = some_logits()
    want = logits[0].log_softmax(-1)
    params = {"temperature": 0.3, "top_k": 2, "logit_bias": ((0, 50.0),), "logprobs": 5}
    params |= {"allowed_token_ids": pack_u32([0, 1]), "bad_words": ((1,),)}
    (one,) = run(logits, a_spec(output=[1], presence_penalty=1.0, **params))
    assert one.token_id == 0
    assert one.logprobs is not None
    assert one.logprobs.logprob == pytest.approx(want[0].item(), abs=1e-6)
    order = want.topk(5)
    assert [i for i, _ in one.logprobs.top] == order.indices.tolist()
    assert [p for _, p in one.logprobs.top] == pytest.approx(order.values.tolist(), abs=1e-6)
    (none,) = run(logits, a_spec(logprobs=0))
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    assert run(logits, a_spec())[0].logprobs is None


def test_equal_alternatives_are_ordered_by_id() -> None:
    """Ties among alternatives have one order."""
    (entry,) = logprobs_of(torch.zeros(1, 6), [2], 6)
    assert [token_id for token_id, _ in entry.top] == list(range(6))
    assert entry.logprob == pytest.approx(-math.log(6))


def test_more_alternatives_than_tokens() -> None:
    """Asking for more alternatives than the vocabulary has gives all of it."""
    (entry,) = logprobs_of(some_logits(), [0], 1000)
    assert len(entry.top) == VOCAB


def test_extreme_logits() -> None:
    """Huge, tiny and masked logits draw a valid token."""
    logits = torch.tensor([[1e30, -1e30, 0.0], [float("-inf"), -5.0, float("-inf")]])
    spec = a_spec(temperature=1e-4, top_p=0.9, top_k=2, min_p=0.1)
    assert [one.token_id for one in run(logits, spec, spec)] == [0, 1]
