"""An exact engine without a model: integer arithmetic that depends on every byte of KV it should.

KV of a position is a function of all tokens up to it, chained over the previous position's KV *as
read from the pool*; a token is a function of the KV of the whole context, read back through the
block table. So one lost, stale, foreign or misplaced block changes the output, and a test of
exactness compares integers. Keeps the Engine contract (base.py), knows no torch, and models the
duration of a step.

All arithmetic is modulo 2^64:

    H[l, p]     = H[l, p-1] * M + mix(token p, p)          layer l, position p; H[l, -1] = mix(l)
    KV[l, p, j] = H[l, p] if j == 0 else mix(H[l, p], j)   8-byte words of key and value
    S[p]        = sum of KV[l, q, j] * odd(l, q, j) over q <= p and all l, j
    token p+1   = choose(S[p], index, sampling)
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.base import Buffer, Engine, OnLayer
from shared.engine.sampling.guides import Guides, RowMask
from shared.errors import LocalProtocolError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.request import TokenLogprobs
from shared.step import RowResult, SampleSpec, StepRow

_MASK = (1 << 64) - 1
_M = 0x5851F42D4C957F2D  # = 5 modulo 8, so its powers repeat only after 2^62 positions
_M_INVERSE = pow(_M, -1, 1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15

Words = Any
"""A numpy array of uint64; numpy's stubs make a mess of wrapping arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTiming:
    """Seconds of a step: ``base_s`` + shares per prompt token, per decode row, and per token of
    context that decode rows read."""

    base_s: float = 0.002
    prefill_token_s: float = 20e-6
    decode_row_s: float = 50e-6
    context_token_s: float = 10e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """The function that the engine computes; engines with equal models give equal tokens.

    eos_every: 0 = an answer never ends by itself; k = about every k-th token is the first of
    ``eos_token_ids``. ``num_kv_heads * head_dim`` must be a multiple of 8.
    """

    name: str = "fake"
    vocab_size: int = 1024
    max_model_len: int = 16384
    eos_token_ids: tuple[int, ...] = (0,)
    eos_every: int = 0
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8

    def __post_init__(self) -> None:
        if self.num_kv_heads * self.head_dim % 8:
            raise LocalProtocolError("num_kv_heads * head_dim must be a multiple of 8")
        if self.eos_every and not self.eos_token_ids:
            raise LocalProtocolError("eos_every needs an end-of-sequence token")
        if not 0 <= max(self.eos_token_ids, default=0) < self.vocab_size:
            raise LocalProtocolError("eos_token_ids must lie in the vocabulary")
        if len(set(self.eos_token_ids)) >= self.vocab_size:
            raise LocalProtocolError("the vocabulary has nothing but end-of-sequence tokens")

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            dtype="uint8",
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def spec(self) -> ModelSpec:
        """What the mesh must know of it."""
        return ModelSpec(
            name=self.name,
            fingerprint=hashlib.sha256(f"pdmesh/fake/1/{self!r}".encode()).digest(),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset(self.eos_token_ids),
            dtype="uint8",
            engine="fake",
        )


DEFAULT_MODEL = FakeModel()
DEFAULT_TIMING = FakeTiming()


# --- the arithmetic -----------------------------------------------------------------------------


def _mix(words: Words) -> Words:
    """SplitMix64's finalizer: a bijection of 64 bits in which every input bit moves all others."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_int(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


class FakeArithmetic:
    """H, KV and S of one model as array operations. KV arrays are ``[layer, key/value, token,
    j]``."""

    def __init__(self, model: FakeModel) -> None:
        self._num_layers = model.num_layers
        self._num_words = model.num_kv_heads * model.head_dim // 8  # of a key, and of a value
        self.seeds: Words = _mix(np.arange(1, model.num_layers + 1, dtype=np.uint64))[:, None]
        j = np.arange(2 * self._num_words, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._word_offsets: Words = j.reshape(1, 2, 1, self._num_words)
        self._powers: Words = np.ones(0, np.uint64)
        self._inverse_powers: Words = np.ones(0, np.uint64)
        self._weights: Words = np.ones((0, 0, 0, 0), np.uint64)
        self._grow(256)

    def chain(self, last: Words, tokens: Sequence[int], start: int) -> Words:
        """H of the tokens at positions ``start...``, ``[layer, token]``. last: H before, ``[layer,
        1]``.

        The recurrence without a loop: H[k] = M^(k+1) last + M^k sum(T[i] M^-i for i <= k).
        """
        count = len(tokens)
        self._grow(count)
        positions = np.arange(start, start + count, dtype=np.uint64) * np.uint64(_GOLDEN)
        terms = _mix(np.asarray(tokens, dtype=np.uint64) + positions + np.uint64(1))
        sums = np.cumsum(terms * self._inverse_powers[:count], dtype=np.uint64)
        powers = self._powers[:count]
        return powers * np.uint64(_M) * last + (powers * sums)[None, :]

    def words(self, chain: Words) -> Words:
        """KV of positions whose H is given."""
        words = _mix(chain[:, None, :, None] + self._word_offsets)
        words[:, 0, :, 0] = chain
        return words

    def shares(self, words: Words, start: int) -> Words:
        """What each position adds to S, ``[token]``."""
        stop = start + words.shape[2]
        self._grow(stop)
        weighted = words * self._weights[:, :, start:stop]
        return weighted.sum(axis=(0, 1, 3), dtype=np.uint64)

    def _grow(self, count: int) -> None:
        if count <= len(self._powers):
            return
        size = max(count, 2 * len(self._powers))
        for name, factor in (("_powers", _M), ("_inverse_powers", _M_INVERSE)):
            powers = np.full(size, factor, np.uint64)
            powers[0] = 1
            setattr(self, name, np.cumprod(powers, dtype=np.uint64))
        # Position is the slowest index, so that weights do not depend on how many there are.
        shape = (size, self._num_layers, 2, self._num_words)
        numbers = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(_GOLDEN)
        weights = (_mix(numbers) | np.uint64(1)).reshape(shape)
        self._weights = np.ascontiguousarray(weights.transpose(1, 2, 0, 3))


def choose_token(
    state: int, sample: SampleSpec, model: FakeModel, mask: RowMask | None = None
) -> int:
    """The next token. Every parameter that would change a real model's choice changes this one.

    mask: of an answer that follows a grammar; any token that it allows is as likely.
    Floats are rounded first: the wire carries them as 32 bits.
    """
    params, salt = sample.params, hashlib.blake2b(digest_size=8)
    if params.needs_history:
        for column in (sample.prompt, sample.output):
            salt.update(array("q", [len(column), *column]).tobytes())
        for value in (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ):
            salt.update(b"%d," % round(value * 10_000))
    for token, bias in params.logit_bias:
        salt.update(b"%d:%d," % (token, round(bias * 10_000)))
    if params.temperature > 0:
        salt.update(b"/%d/%d/%d/" % (params.seed, sample.index, params.top_k))
        for value in (params.temperature, params.top_p, params.min_p):
            salt.update(b"%d," % round(value * 10_000))
    word = _mix_int(state ^ int.from_bytes(salt.digest(), "little"))
    if mask is not None:
        bits = np.unpackbits(mask.bits, bitorder="little", count=model.vocab_size)
        kept = np.flatnonzero(bits)
        return int(kept[word % kept.size])
    if not (params.has_masks or sample.index < params.min_tokens):
        return _nearest(word, frozenset(), model)
    forbidden = sample.forbidden(frozenset(model.eos_token_ids))
    allowed = memoryview(params.allowed_token_ids).cast("I").tolist()
    if not allowed:
        return _nearest(word, forbidden, model)
    kept = [token for token in allowed if token not in forbidden] or allowed
    return kept[word % len(kept)]


def _nearest(word: int, forbidden: Set[int], model: FakeModel) -> int:
    """The token of a word: end-of-sequence now and then, else the next one that is allowed."""
    eos = model.eos_token_ids
    if model.eos_every and (word >> 32) % model.eos_every == 0 and eos[0] not in forbidden:
        return eos[0]
    token = word % model.vocab_size
    while token in eos or token in forbidden:
        token = (token + 1) % model.vocab_size
    return token


def _logprobs(state: int, token: int, num_top: int, model: FakeModel) -> TokenLogprobs:
    """Invented, but fixed by state and token, and exact in 32-bit floats."""
    logprob = -(1 + _mix_int(state + token) % 1024) / 256
    top = tuple(
        ((token + rank) % model.vocab_size, logprob - rank / 2)
        for rank in range(min(num_top, model.vocab_size))
    )
    return TokenLogprobs(logprob, top)


def prompt_logprobs_at(state: int, target: int, num_top: int, model: FakeModel) -> TokenLogprobs:
    own = _logprobs(state, target, 0, model)
    return TokenLogprobs(
        own.logprob, _logprobs(state, state % model.vocab_size, num_top, model).top
    )


# --- the engine ---------------------------------------------------------------------------------


class FakeEngine(Engine):
    """``Engine`` over a numpy pool.

    real_time: the compute thread really sleeps for the modelled time, ``on_layer`` evenly spread
    over it. Otherwise a step takes what the arithmetic takes, and the shell may sleep.
    """

    def __init__(
        self,
        *,
        model: FakeModel = DEFAULT_MODEL,
        num_blocks: int = 1024,
        block_size: int = 16,
        timing: FakeTiming = DEFAULT_TIMING,
        real_time: bool = False,
        guides: Guides | None = None,
    ) -> None:
        self._guides = guides
        self.model = model
        self.spec = model.spec
        self.layout = model.layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._timing = timing
        self._real_time = real_time
        self._arithmetic = FakeArithmetic(model)
        num_words = model.num_kv_heads * model.head_dim // 8
        shape = (model.num_layers, 2, num_blocks * block_size, num_words)
        self._pool: Words = np.zeros(shape, np.uint64)

    def step(self, rows: Sequence[StepRow], on_layer: OnLayer | None = None) -> list[RowResult]:
        """See ``Engine.step``. Writes layer by layer, so a gather that comes too early is
        caught."""
        begin = time.perf_counter()
        guided = self._guides.begin(rows) if self._guides is not None else None
        duration = self.step_seconds(rows) if self._real_time else 0.0
        writes = [self._computed(row) for row in rows]
        for layer in range(self.model.num_layers):
            for slots, words in writes:
                self._pool[layer][:, slots] = words[layer]
            if self._real_time:
                due = begin + duration * (layer + 1) / self.model.num_layers
                time.sleep(max(0.0, due - time.perf_counter()))
            if on_layer is not None:
                on_layer(layer)
        masks = {} if guided is None else guided.result().by_row(rows)
        return [self._result(row, masks.get(idx)) for idx, row in enumerate(rows)]

    @property
    def machine(self) -> Mapping[str, str]:
        return {}

    def expect(self, grammar: str) -> Future[Any]:
        if self._guides is None:
            return super().expect(grammar)
        return self._guides.expect(grammar)

    def close(self) -> None:
        if self._guides is not None:
            self._guides.close()

    def pool_arrays(self) -> Sequence[np.ndarray]:
        """See Engine: keys and values of every layer."""
        return [part for layer in self._pool for part in layer]

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        """Return what a step takes. A row of one token counts as a decode row."""
        if not rows:
            return 0.0
        seconds = self._timing.base_s
        for row in rows:
            if len(row.token_ids) == 1:
                seconds += self._timing.decode_row_s
                seconds += self._timing.context_token_s * (row.start + 1)
            else:
                seconds += self._timing.prefill_token_s * len(row.token_ids)
        return seconds

    def new_buffer(self, num_bytes: int) -> Buffer:
        return np.zeros(num_bytes, np.uint8)

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        out: Buffer,
    ) -> None:
        """See ``Engine.gather``. Fills the first bytes of a larger buffer."""
        words = self._pool[first_layer:last_layer, :, self._slots(block_table, start, stop)]
        flat = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        self._first_bytes(out, flat.size)[:] = flat

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        first_layer: int,
        last_layer: int,
        data: Buffer,
    ) -> None:
        """See ``Engine.scatter``. Reads the first bytes of a larger buffer."""
        slots = self._slots(block_table, start, stop)
        shape = (last_layer - first_layer, 2, stop - start, self._pool.shape[3])
        frame = self._first_bytes(data, int(np.prod(shape)) * 8).tobytes()
        words = np.frombuffer(frame, np.uint64).reshape(shape)
        self._pool[first_layer:last_layer, :, slots] = words

    def _computed(self, row: StepRow) -> tuple[Words, Words]:
        """The slots and KV of a row's tokens; H goes on from what the pool says."""
        if row.start:
            before = self._slots(row.block_table, row.start - 1, row.start)
            last = self._pool[:, 0, before, 0]
        else:
            last = self._arithmetic.seeds
        chain = self._arithmetic.chain(last, row.token_ids, row.start)
        stop = row.start + len(row.token_ids)
        return self._slots(row.block_table, row.start, stop), self._arithmetic.words(chain)

    def _result(self, row: StepRow, mask: RowMask | None) -> RowResult:
        if row.sample is None and not row.prompt_targets:
            return RowResult(-1)
        # Reads the whole context back, this row's tokens included.
        stop = row.start + len(row.token_ids)
        words = self._pool[:, :, self._slots(row.block_table, 0, stop)]
        states = np.cumsum(self._arithmetic.shares(words, 0), dtype=np.uint64)[row.start :].tolist()
        prompt_logprobs = tuple(
            prompt_logprobs_at(state, target, row.prompt_logprobs or 0, self.model)
            for state, target in zip(states, row.prompt_targets, strict=False)
        )
        if row.sample is None:
            return RowResult(-1, None, prompt_logprobs)
        token_id = choose_token(states[-1], row.sample, self.model, mask)
        logprobs = None
        if row.sample.params.logprobs is not None:
            num_top = row.sample.params.logprobs
            logprobs = _logprobs(states[-1], token_id, num_top, self.model)
        failure = "" if mask is None else mask.failure
        return RowResult(token_id, logprobs, prompt_logprobs, failure)

    def _slots(self, block_table: Sequence[int], start: int, stop: int) -> Words:
        size = self.block_size
        if not 0 <= start <= stop <= len(block_table) * size:
            raise LocalProtocolError(
                f"tokens [{start}, {stop}) lie outside a table of {len(block_table)} blocks"
            )
        positions = np.arange(start, stop)
        first = start // size
        blocks = np.asarray(block_table[first : -(-stop // size)], dtype=np.int64)
        return blocks[positions // size - first] * size + positions % size

    @staticmethod
    def _first_bytes(buffer: Buffer, num_bytes: int) -> Words:
        view = np.frombuffer(buffer, np.uint8)
        if view.size < num_bytes:
            raise LocalProtocolError(f"{view.size} bytes of buffer for {num_bytes} bytes of KV")
        return view[:num_bytes]
