"""What a client asked, after validation: the same record in all three services.

No wire type and no tokenizer here; the gateway builds these, ``shared/messages/codec.py`` moves
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import msgspec

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would only overflow float32."""


class FinishReason(IntEnum):
    """Why a sequence ended; the values are those of ``proto/pdmesh/v1/common.proto``."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. Defaults are greedy decoding with everything else off.

    Stop strings are not here: the gateway alone knows text.
    seed: token i is a pure function of (seed, i, logits), so a request that moves to another worker
    continues with the very tokens it would have had.
    logprobs: None = off, k = the chosen token's logprob and the k most likely alternatives.
    allowed_token_ids: u32 column, little-endian, as it travels (it may name most of a vocabulary,
    and is read in every step): no other token is chosen; empty = all may be.
    bad_words: token sequences that the answer never holds, as in vLLM: whenever it ends with all
    of one but its last token, that one is not chosen.
    grammar: what the answer as a whole matches, as ``shared/grammar.py`` writes it; '' = anything.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: bytes = field(default=b"", repr=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = field(default="", repr=False)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    needs_history: bool = field(init=False, repr=False, compare=False)
    """Whether earlier tokens change the logits; asked for every row of every step."""
    has_masks: bool = field(init=False, repr=False, compare=False)
    """Whether the client names tokens that may come, or may not; asked likewise."""

    def __post_init__(self) -> None:
        needs_history = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
        )
        object.__setattr__(self, "needs_history", needs_history)
        has_masks = bool(self.allowed_token_ids or self.bad_words)
        object.__setattr__(self, "has_masks", has_masks)


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position, of the raw model distribution (before temperature
    and filters).

    logprob: of the token itself (NaN for the first prompt token, which nothing predicts).
    top: (token id, logprob), most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class AnswerToken(msgspec.Struct, frozen=True, gc=False):
    """A token of an answer, as a worker tells it and a gateway hands it on. There is one for each,
    so it is a record that costs a quarter of a named tuple to make.

    index: in the answer, from 0. prompt_logprobs: with an attempt's first token if asked for,
    one entry a prompt token, the first NaN.
    """

    index: int
    token_id: int
    finish_reason: FinishReason = FinishReason.NONE
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


MAX_SALT_BYTES = 64
"""Longest ``cache_salt``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One attempt of one request, as a worker sees it.

    token_ids: the prompt, then the tokens that an earlier attempt already produced.
    num_prompt_tokens: length of the client's prompt; the next token has index ``len(token_ids) -
    num_prompt_tokens``. cache_salt: keys the prefix cache, so that tenants never share KV; empty =
    the shared pool.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: bytes = b""

    @property
    def next_index(self) -> int:
        """Index, in the answer, of the next token to sample."""
        return len(self.token_ids) - self.num_prompt_tokens


def finish_reason_of(
    token_id: int,
    index: int,
    total_len: int,
    sampling: SamplingParams,
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> FinishReason:
    """Decide whether the token just sampled ends its sequence; the one place where this is decided.

    index: of this token in the answer. total_len: prompt and answer including this token.
    """
    num_output = index + 1
    if num_output >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
    if num_output >= sampling.max_tokens or total_len >= max_model_len:
        return FinishReason.LENGTH
    return FinishReason.NONE
