"""What the fake engine's model says, computed without pool or engine: the reference of exactness
tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.engine.fake import (
    DEFAULT_MODEL,
    FakeArithmetic,
    FakeModel,
    Words,
    choose_token,
    prompt_logprobs_at,
)
from shared.request import FinishReason, SamplingParams, TokenLogprobs, finish_reason_of
from shared.step import SampleSpec


def fake_continuation(
    tokens: Sequence[int],
    num_tokens: int,
    params: SamplingParams | None = None,
    *,
    num_prompt_tokens: int | None = None,
    model: FakeModel = DEFAULT_MODEL,
) -> list[int]:
    """Return the next ``num_tokens`` tokens: the reference of exactness tests.

    num_prompt_tokens: where the answer begins, if ``tokens`` holds a part of it. Stops for nothing,
    not even for end-of-sequence.
    """
    params = params or SamplingParams()
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    context, everything = _Context(model), list(tokens)
    state = int(context.extend(everything)[-1])
    while len(everything) < len(tokens) + num_tokens:
        output = everything[num_prompt:]
        spec = SampleSpec(params, len(output), everything[:num_prompt], output)
        everything.append(choose_token(state, spec, model))
        state = int(context.extend(everything[-1:])[-1])
    return everything[len(tokens) :]


def fake_answer(
    prompt: Sequence[int], params: SamplingParams, *, model: FakeModel = DEFAULT_MODEL
) -> tuple[list[int], FinishReason]:
    """Return the whole answer to a prompt, and why it ends."""
    num_most = max(1, min(params.max_tokens, model.max_model_len - len(prompt)))
    answer = fake_continuation(prompt, num_most, params, model=model)
    for index, token in enumerate(answer):
        reason = finish_reason_of(
            token,
            index,
            len(prompt) + index + 1,
            params,
            eos_token_ids=frozenset(model.eos_token_ids),
            max_model_len=model.max_model_len,
        )
        if reason is not FinishReason.NONE:
            return answer[: index + 1], reason
    raise AssertionError("an answer of max_tokens tokens is finished")


def fake_prompt_logprobs(
    prompt: Sequence[int], num_top: int, *, model: FakeModel = DEFAULT_MODEL
) -> list[TokenLogprobs]:
    """Return the logprobs of the prompt's tokens but the first, which nothing predicts."""
    states = _Context(model).extend(prompt)[:-1]
    pairs = zip(states.tolist(), prompt[1:], strict=True)
    return [prompt_logprobs_at(state, target, num_top, model) for state, target in pairs]


class _Context:
    """H and S of one token list, kept by value. The engine keeps them in the pool instead."""

    def __init__(self, model: FakeModel) -> None:
        self._arithmetic = FakeArithmetic(model)
        self._last = self._arithmetic.seeds
        self._state = np.zeros(1, np.uint64)
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> Words:
        """Append tokens and return S at each of them."""
        start, stop = self._num_tokens, self._num_tokens + len(tokens)
        chain = self._arithmetic.chain(self._last, tokens, start)
        shares = self._arithmetic.shares(self._arithmetic.words(chain), start)
        states = np.cumsum(shares, dtype=np.uint64) + self._state
        self._last, self._state, self._num_tokens = chain[:, -1:], states[-1:], stop
        return states
