"""From logits to tokens: penalties, filters, one random number, and the logprobs asked for.

All rows of a step are handled together; no state is kept. On a GPU work is queued and the host
waits once for the tokens, once more for logprobs. Order of operations as in vLLM:

    raw logits -> logprobs                           (reported ones, untouched by what follows)
    penalties -> logit bias -> masks                 (these can change a greedy choice)
    argmax, or: temperature -> min-p -> top-k -> top-p -> draw

A draw inverts the cumulative distribution at the number of (seed, index), see ``philox.py``, with
tokens in the order of their ids. Not sorted by probability: logits of one position differ in the
last bits between batches and machines, and in sorted order two near-equal tokens that change places
would change the draw of all that follow them; in id order the drawn token changes only when the
number lies within that noise of a border. For the same reason filters keep or drop ties together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from shared.engine.gpu.upload import to_device
from shared.engine.sampling.guides import Masks
from shared.engine.sampling.philox import uniforms
from shared.request import GREEDY_BELOW, SamplingParams, TokenLogprobs
from shared.step import RowResult, SampleSpec

_NUCLEUS_GUESS = 1024
"""Sorted candidates looked at before top-p sorts the whole vocabulary."""

_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)
"""What a byte of a mask adds to eight logits. Ten times as quick as torch's ``masked_fill_`` on a
CPU, whose branches a grammar's mask makes hard to guess."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether these params take the most likely token."""
    return params.temperature < GREEDY_BELOW


def is_plain_greedy(spec: SampleSpec) -> bool:
    """Whether the most likely token of those that its grammar allows is the answer, and nothing is
    told of the others."""
    return spec.params.logprobs is None and is_most_likely(spec)


def is_most_likely(spec: SampleSpec) -> bool:
    """Whether the most likely token by the logits is the answer, or by its grammar's mask, too."""
    params = spec.params
    return (
        is_greedy(params)
        and not params.needs_history
        and not params.logit_bias
        and not params.has_masks
        and spec.index >= params.min_tokens
    )


def needs_no_host(spec: SampleSpec) -> bool:
    """Whether its choice needs no number of the device's and nothing of the answer so far."""
    params = spec.params
    # top_p looks whether its candidates suffice.
    return (
        params.logprobs is None
        and spec.guide is None
        and not params.needs_history
        and (is_greedy(params) or params.top_p >= 1)
    )


def sample(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    *,
    eos_token_ids: frozenset[int],
    guide: Callable[[], None] | None = None,
) -> list[RowResult]:
    """Choose one token per row.

    logits: float32 ``[len(specs), vocab_size]``; overwritten. guide: does as ``deny`` with masks of
    these rows.
    """
    asked = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not asked:
        token_ids = choose(logits, specs, eos_token_ids=eos_token_ids, guide=guide)
        return [RowResult(token_id) for token_id in token_ids.tolist()]
    # First: all that follows overwrites the logits.
    places = _numbers(asked, np.int64, logits.device)
    raw = logits.index_select(0, places).log_softmax(dim=-1)
    token_ids = choose(logits, specs, eos_token_ids=eos_token_ids, guide=guide)
    num_top = [specs[row].params.logprobs or 0 for row in asked]
    entries = _read(raw, token_ids.index_select(0, places), num_top)
    told = dict(zip(asked, entries, strict=True))
    return [RowResult(token_id, told.get(row)) for row, token_id in enumerate(token_ids.tolist())]


def choose(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    *,
    eos_token_ids: frozenset[int],
    guide: Callable[[], None] | None = None,
) -> torch.Tensor:
    """As ``sample``, but the token ids stay on the device: int64 ``[len(specs)]``."""
    _penalise(logits, specs)
    _bias(logits, specs)
    if guide is not None:
        guide()
    _mask(logits, specs, eos_token_ids)
    drawn = [row for row, spec in enumerate(specs) if not is_greedy(spec.params)]
    if len(drawn) == len(specs):
        return _draw(logits, specs)
    token_ids = _most_likely(logits)
    if drawn:
        rows = _numbers(drawn, np.int64, logits.device)
        chosen = _draw(logits.index_select(0, rows), [specs[row] for row in drawn])
        token_ids.index_copy_(0, rows, chosen)
    return token_ids


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return what each row's raw distribution says of one token, with ``num_top`` alternatives.

    logits: float32 ``[len(token_ids), vocab_size]``; not changed.
    """
    chosen = _numbers(token_ids, np.int64, logits.device)
    return _read(logits.log_softmax(dim=-1), chosen, [num_top] * len(token_ids))


def _read(
    logprobs: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """What each row says of its chosen token, and of its most likely ones, ties by id."""
    most = max(num_top, default=0)
    count = min(most + 1, logprobs.shape[1]) if most else 0  # one more: does the last one tie?
    values, ids = logprobs.topk(count, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    # One transfer, and so one wait for the device: float64 holds ids and float32 alike.
    table = torch.cat([part.double() for part in (of_chosen, values, ids)], dim=1).tolist()
    entries: list[TokenLogprobs] = []
    for row, (value, *rest) in enumerate(table):
        top = list(zip(map(int, rest[count:]), rest[:count], strict=True))
        wanted = num_top[row]
        if 0 < wanted < count and top[wanted - 1][1] == (border := top[wanted][1]):
            # Of those that tie there ``topk`` took any.
            tied = (logprobs[row] == border).nonzero()[:wanted, 0].tolist()
            top = [*(pair for pair in top if pair[1] > border), *((it, border) for it in tied)]
        top.sort(key=lambda item: (-item[1], item[0]))
        entries.append(TokenLogprobs(value, tuple(top[:wanted])))
    return entries


def _numbers(values: Sequence[float], dtype: type, device: torch.device) -> torch.Tensor:
    return to_device(np.asarray(values, dtype=dtype), device)


def _penalise(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Apply penalties in place.

    Repetition (Keskar et al. 2019, CTRL) looks at prompt and output, as transformers does. Presence
    and frequency look at the output only, as OpenAI and vLLM do.
    """
    vocab_size = logits.shape[1]
    for row, spec in enumerate(specs):
        params = spec.params
        if not params.needs_history:
            continue
        scores = logits[row]
        output = _known_ids(spec.output, vocab_size)
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.concatenate((_known_ids(spec.prompt, vocab_size), output)))
            ids = to_device(seen, logits.device)
            old = scores[ids]
            penalty = params.repetition_penalty
            # Either way down: a negative logit that is divided would go up.
            scores[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            seen, counts = np.unique(output, return_counts=True)
            drop = params.presence_penalty + params.frequency_penalty * counts
            drops = to_device(drop.astype(np.float32), logits.device)
            scores[to_device(seen, logits.device)] -= drops


def _known_ids(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _bias(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, spec in enumerate(specs):
        for token_id, value in spec.params.logit_bias:
            if 0 <= token_id < logits.shape[1]:
                rows.append(row)
                ids.append(token_id)
                values.append(value)
    if rows:
        place = to_device(np.array((rows, ids)), logits.device)
        added = _numbers(values, np.float32, logits.device)
        logits.index_put_(tuple(place), added, accumulate=True)


def _mask(logits: torch.Tensor, specs: Sequence[SampleSpec], eos_token_ids: frozenset[int]) -> None:
    """Leave each row the tokens that it may choose: allowed ones, none that is forbidden now.

    Where all allowed ones are forbidden, the allowed ones stay: something must come next.
    """
    rows: list[int] = []
    ids: list[int] = []
    vocab_size = logits.shape[1]
    for row, spec in enumerate(specs):
        params = spec.params
        if spec.index >= params.min_tokens and not params.has_masks:
            continue
        forbidden = [one for one in spec.forbidden(eos_token_ids) if 0 <= one < vocab_size]
        if params.allowed_token_ids:
            allowed = np.frombuffer(params.allowed_token_ids, "<u4").astype(np.int64)
            allowed = allowed[allowed < vocab_size]
            kept = allowed[~np.isin(allowed, forbidden)]
            places = to_device(kept if kept.size else allowed, logits.device)
            scores = logits[row, places]
            logits[row] = float("-inf")
            logits[row, places] = scores
        else:
            rows += [row] * len(forbidden)
            ids += forbidden
    if rows:
        logits[tuple(to_device(np.array((rows, ids)), logits.device))] = float("-inf")


def deny(logits: torch.Tensor, masks: Masks) -> None:
    """Leave the rows that follow a grammar the tokens that it allows. logits: see ``sample``."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        scores = logits.numpy()
        added = np.empty((masks.bits.shape[1], 8), np.float32)
        for place, bits in zip(masks.places, masks.bits, strict=True):
            _ADDED.take(bits, axis=0, out=added, mode="clip")  # "raise" copies ``out``
            scores[place] += added.reshape(-1)[:vocab_size]
        return
    bits = to_device(masks.bits, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    banned = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size] == 0
    places = _numbers(masks.places, np.int64, logits.device)
    rows = logits.index_select(0, places).masked_fill_(banned, float("-inf"))
    logits.index_copy_(0, places, rows)


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The first most likely token of each row; int64 ``[rows]``."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(dim=-1)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Draw one token per row; int64 ``[len(specs)]``."""
    device = logits.device

    def column(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
        return _numbers(values, dtype, device)[:, None]

    params = [spec.params for spec in specs]
    # Shifted first, so that a low temperature cannot overflow.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits = logits / column([one.temperature for one in params])
    if any(one.min_p > 0 for one in params):
        # The maximum is 0 now, so p / p_max = exp(logit).
        logits = logits.masked_fill(
            logits.exp() < column([one.min_p for one in params]), float("-inf")
        )
    if any(one.top_k > 0 for one in params):
        logits = _keep_top_k(logits, [one.top_k for one in params])
    probs = logits.double().softmax(dim=-1)
    if any(one.top_p < 1 for one in params):
        probs = _keep_nucleus(probs, column([one.top_p for one in params], np.float64))
    cumulative = probs.cumsum(dim=-1)
    numbers = uniforms([one.seed for one in params], [spec.index for spec in specs])
    # Scaling by the total also renormalises. The first token whose cumulative mass exceeds the
    # target; a token of probability 0 never does so first.
    targets = to_device(numbers, device)[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return places.clamp_(max=logits.shape[1] - 1)


def _keep_top_k(logits: torch.Tensor, top_ks: Sequence[int]) -> torch.Tensor:
    """Keep tokens not below the k-th best; 0 = all."""
    vocab_size = logits.shape[1]
    counts = [min(k, vocab_size) if k > 0 else 0 for k in top_ks]
    best = logits.topk(max(counts), dim=-1).values
    place = _numbers([max(k - 1, 0) for k in counts], np.int64, logits.device)[:, None]
    border = best.gather(1, place)
    is_off = _numbers([k == 0 for k in counts], np.bool_, logits.device)[:, None]
    border = border.masked_fill(is_off, float("-inf"))
    return logits.masked_fill(logits < border, float("-inf"))


def _keep_nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the most likely tokens that together reach top_p (Holtzman et al. 2019).

    probs: float64, rows sum to 1. top_p: ``[rows, 1]``.
    """
    vocab_size = probs.shape[1]
    best = probs.topk(min(_NUCLEUS_GUESS, vocab_size), dim=-1).values
    reached = best.cumsum(dim=-1)
    if vocab_size > _NUCLEUS_GUESS and bool(((reached[:, -1:] < top_p) & (top_p < 1)).any()):
        best = probs.sort(dim=-1, descending=True).values
        reached = best.cumsum(dim=-1)
    # The first place where the mass is reached; rounding may leave it just under 1.
    place = (reached < top_p).sum(dim=-1, keepdim=True).clamp_(max=best.shape[1] - 1)
    border = best.gather(1, place)
    return probs.masked_fill((probs < border) & (top_p < 1), 0.0)
