"""What a client may ask for: every bound and range in one place, the same for HTTP and gRPC.

Counts are bounded before anything is allocated for them. This module knows neither JSON nor
protobuf nor a tokenizer: ``openai_forms.py`` and ``grpc/forms.py`` fill a ``SamplingForm``, and
``sampling_params`` makes of it the record that the workers get. Messages never repeat a client's
text; they name the field and the rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.gateway.mesh import ServedModel
from shared.errors import InvalidRequest
from shared.messages.columns import pack_u32
from shared.request import GREEDY_BELOW, SamplingParams
from shared.tenants import MAX_LIMIT_MS, MAX_PRIORITY, Asked

MAX_CONNECTIONS = 16_384
MAX_BODY_BYTES = 4 << 20
MAX_BODIES_BYTES = 512 << 20
"""Of all requests in hand together, but for bodies that come with one read."""

MAX_HEADER_LINE_BYTES = 8190
MAX_HEADERS = 100
MAX_JSON_DEPTH = 64
MAX_JSON_BRACKETS = 1 << 16
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_PROMPTS = 512
MAX_ANSWERS = 512
"""To all prompts of a request together, but one prompt may have as many as ``--max-choices``."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 64
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20
MAX_LABEL_CHARS = 128
MAX_RENDERED_CHARS = MAX_BODY_BYTES
MAX_TEMPLATE_ARGUMENTS = 16
MAX_TEMPLATE_CHARS = 1 << 16
MAX_TIMEOUT_S = 86_400.0
STALL_S = 10.0
"""How long a client may leave a full stream unread before it is cut off."""

_U64 = 1 << 64

INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, (1 << 32) - 1),
    "top_k": (-1, (1 << 31) - 1),
    # OpenAI's seed is a signed 64-bit number, ours unsigned: negative ones are read modulo 2^64.
    "seed": (-(1 << 63), _U64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (0, MAX_PRIORITY),
}
"""Least and largest value, both allowed."""

NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    # Logits are divided by it: near 0 they would overflow float32.
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (-100.0, 100.0),
}
"""Likewise."""

ABOVE_ZERO: dict[str, float] = {"top_p": 1.0, "ttft_ms": MAX_LIMIT_MS, "tpot_ms": MAX_LIMIT_MS}
"""Largest value; 0 itself is not allowed."""

LABEL_PATTERN = f"[A-Za-z0-9._-]{{1,{MAX_LABEL_CHARS}}}"
ROLES = ("system", "developer", "user", "assistant")
SIDES = ("left", "right")
BIAS_KEY_PATTERN = "0|[1-9][0-9]{0,9}"
"""Of logit_bias: a token id, written in one way alone."""

_LABEL = re.compile(LABEL_PATTERN)


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class SamplingForm:
    """Sampling as a client wrote it: None = not given. Field names are the names in error messages.

    max_tokens_param: the name under which the client gave ``max_tokens``. seed: None = random per
    request.
    """

    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Sequence[tuple[int, float]] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    grammar: str = ""


def refusal(param: str, rule: str, *, code: str = "") -> InvalidRequest:
    """Return the error for a field that breaks a rule; its message names the field."""
    return InvalidRequest(f"{param}: {rule}" if param else rule, param=param, code=code)


def checked_label(text: str, *, param: str) -> str:
    """Return a client's id for its request, fit for a log line; empty = none.

    Raises InvalidRequest: longer than MAX_LABEL_CHARS or with other characters than
    ``[A-Za-z0-9._-]``.
    """
    if text and _LABEL.fullmatch(text) is None:
        raise refusal(param, f"must be at most {MAX_LABEL_CHARS} characters of A-Z a-z 0-9 . _ -")
    return text


def label_or_none(text: str) -> str:
    """Return a client's id for its request if it is fit for a log line, else none: a header that
    proxies set is no reason to refuse a request."""
    return text if _LABEL.fullmatch(text) is not None else ""


def checked_role(role: str, *, param: str, roles: Sequence[str] = ROLES) -> str:
    """Return the role of a chat message as templates know it. Raises InvalidRequest: another than
    these, which some templates would pass over and others take for the user's."""
    if role not in roles:
        raise refusal(param, f"must be one of {', '.join(roles)}", code="unsupported")
    # OpenAI renamed the role for its newer models; templates know the old name.
    return "system" if role == "developer" else role


def checked_salt(text: str | None) -> bytes:
    """Return a client's own cache salt as bytes; same alphabet as a label."""
    return checked_label(text or "", param="cache_salt").encode("ascii")


def checked_count(
    count: int, most: int, *, param: str, what: str = "entries", least: int = 0
) -> None:
    """Raise InvalidRequest unless ``least <= count <= most``."""
    if not least <= count <= most:
        raise refusal(param, f"must have {least} to {most} {what}, not {count}")


def checked_range(value: float, low: float, high: float, *, param: str) -> float:
    """Return the value; raise InvalidRequest unless it is finite and ``low <= value <= high``."""
    if not math.isfinite(value) or not low <= value <= high:
        raise refusal(param, f"must be between {low:g} and {high:g}")
    return value


def checked_int(value: int, low: int, high: int, *, param: str) -> int:
    """Return the value; raise InvalidRequest unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise refusal(param, f"must be between {low} and {high}")
    return value


def checked_above_zero(value: float, high: float, *, param: str) -> float:
    """Return the value; raise InvalidRequest unless it is finite and ``0 < value <= high``."""
    if not math.isfinite(value) or not 0.0 < value <= high:
        raise refusal(param, f"must be above 0 and at most {high:g}")
    return value


def checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings without repetitions; each has 1 to MAX_STOP_CHARS characters."""
    if not stop:
        return ()
    checked_count(len(stop), MAX_STOP_STRINGS, param="stop", what="strings")
    for text in stop:
        checked_count(len(text), MAX_STOP_CHARS, param="stop", what="characters each", least=1)
    return tuple(dict.fromkeys(stop))


def checked_bad_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words; each has 1 to MAX_STOP_CHARS characters, and one that is no space."""
    if not words:
        return ()
    checked_count(len(words), MAX_BAD_WORDS, param="bad_words", what="words")
    for word in words:
        checked_count(len(word), MAX_STOP_CHARS, param="bad_words", what="characters each", least=1)
        if not word.strip():
            raise refusal("bad_words", "a word must have a character that is no space")
    return words


def checked_asked(form: Asked, headers: Asked, *, tenant: str) -> Asked:
    """Return what a request asks of the queue: its form's fields come before headers. Raises
    InvalidRequest: out of range."""
    priority = headers.priority if form.priority is None else form.priority
    ttft_ms = headers.ttft_ms if form.ttft_ms is None else form.ttft_ms
    tpot_ms = headers.tpot_ms if form.tpot_ms is None else form.tpot_ms
    if priority is not None:
        checked_int(priority, 0, MAX_PRIORITY, param="priority")
    for param, limit_ms in (("ttft_ms", ttft_ms), ("tpot_ms", tpot_ms)):
        if limit_ms is not None:
            checked_above_zero(limit_ms, MAX_LIMIT_MS, param=param)
    return Asked(tenant, priority, ttft_ms, tpot_ms)


def truncated(
    token_ids: Sequence[int], keep: int | None, side: str | None, *, longest: int
) -> Sequence[int]:
    """Return what a client wants of its prompt: at most ``keep`` tokens, the last or the first
    ones.

    keep: None = all, -1 = ``longest``, which leaves room for the answer. side: where it is cut,
    None = left. Raises InvalidRequest.
    """
    if side is not None and side not in SIDES:
        raise refusal("truncation_side", "must be left or right")
    if keep is None:
        return token_ids
    if keep != -1:
        keep = checked_int(keep, 1, INTEGERS["max_tokens"][1], param="truncate_prompt_tokens")
    # One at least, for ``[-0:]`` would be all of them.
    keep = max(longest, 1) if keep == -1 else keep
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def checked_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> tuple[int, ...]:
    """Return the ids; raise InvalidRequest if one is negative or not below the vocabulary size."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise refusal(
            param, f"token ids must be between 0 and {vocab_size - 1}", code="bad_token_id"
        )
    return tuple(token_ids)


def checked_prompt(token_ids: Sequence[int], model: ServedModel, *, param: str) -> tuple[int, ...]:
    """Return a prompt's ids, neither empty nor too long to leave room for one generated token."""
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param=param, code="empty_prompt")
    if len(token_ids) >= model.max_model_len:
        raise context_length_exceeded(model, len(token_ids), 1, param=param)
    return checked_token_ids(token_ids, model.vocab_size, param=param)


def context_length_exceeded(
    model: ServedModel, num_prompt_tokens: int, max_tokens: int, *, param: str
) -> InvalidRequest:
    """The error that agents look for, with the numbers that let them shorten their prompt or their
    answer, and go on: first in Anthropic's words, by which Claude Code knows it, then in OpenAI's.
    Its sentence holds its code, because langchain looks for that there."""
    most = model.max_model_len
    said = (
        f"prompt is too long: {num_prompt_tokens} tokens > {most - 1} maximum"
        if num_prompt_tokens >= most
        else "input length and `max_tokens` exceed context limit: "
        f"{num_prompt_tokens} + {max_tokens} > {most}"
    )
    return InvalidRequest(
        f"{said}. This model's maximum context length is {most} tokens. However, you "
        f"requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the prompt, "
        f"{max_tokens} for the completion). Please reduce the length of the prompt or of the "
        "completion (context_length_exceeded).",
        param=param,
        code="context_length_exceeded",
    )


def sampling_params(
    form: SamplingForm,
    *,
    model: ServedModel,
    num_prompt_tokens: int,
    default_max_tokens: int | None,
    defaults: Mapping[str, float],
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    allowed: bytes = b"",
) -> SamplingParams:
    """Check a form against the model and fill every default.

    defaults: of the model folder's generation_config.json. default_max_tokens: None = the rest of
    the context. seed: used when the client gave none. bad_words: the form's, as tokens. allowed:
    its allowed tokens, checked: once, and not for each of many prompts.
    Raises InvalidRequest: the first field that breaks a rule.
    """
    room = model.max_model_len - num_prompt_tokens
    if form.max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(default_max_tokens, room)
    else:
        max_tokens = checked_int(
            form.max_tokens, *INTEGERS["max_tokens"], param=form.max_tokens_param
        )
        if max_tokens > room:
            raise context_length_exceeded(
                model, num_prompt_tokens, max_tokens, param=form.max_tokens_param
            )
    temperature = _number(form.temperature, "temperature", defaults, 1.0)
    top_p = defaults.get("top_p", 1.0) if form.top_p is None else form.top_p
    # -1 is the other customary way to say "off".
    given = defaults.get("top_k", 0) if form.top_k is None else form.top_k
    top_k = _integer(int(given), "top_k")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=checked_int(form.min_tokens or 0, 0, max_tokens, param="min_tokens"),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=0 if top_k >= model.vocab_size else max(top_k, 0),
        top_p=checked_above_zero(top_p, ABOVE_ZERO["top_p"], param="top_p"),
        min_p=_number(form.min_p, "min_p", defaults, 0.0),
        repetition_penalty=_number(form.repetition_penalty, "repetition_penalty", defaults, 1.0),
        presence_penalty=_number(form.presence_penalty, "presence_penalty", {}, 0.0),
        frequency_penalty=_number(form.frequency_penalty, "frequency_penalty", {}, 0.0),
        logit_bias=_checked_bias(form.logit_bias, model.vocab_size),
        seed=seed if form.seed is None else _integer(form.seed, "seed") % _U64,
        stop_token_ids=_checked_stop_ids(form.stop_token_ids, model.vocab_size),
        ignore_eos=form.ignore_eos,
        logprobs=_checked_logprobs(form.logprobs, "logprobs"),
        prompt_logprobs=_checked_logprobs(form.prompt_logprobs, "prompt_logprobs"),
        allowed_token_ids=allowed,
        bad_words=bad_words,
        grammar=form.grammar,
    )


def require_guidable(form: SamplingForm, param: str) -> None:
    """Raise InvalidRequest if a form both leaves the choice of tokens to a grammar and does not.

    param: the field that asks for the grammar.
    """
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
        if getattr(form, name):
            raise refusal(
                name, f"does not go with {param}, which says what may come and when to end"
            )


def seed_of_choice(seed: int, choice: int) -> int:
    """Seed of one of several answers to one prompt: the first keeps the client's, the others differ
    (splitmix64).

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) % _U64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _U64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % _U64
    return mixed ^ (mixed >> 31)


def _integer(value: int, param: str) -> int:
    return checked_int(value, *INTEGERS[param], param=param)


def _number(
    value: float | None, param: str, defaults: Mapping[str, float], otherwise: float
) -> float:
    if value is None:
        value = defaults.get(param)
    return otherwise if value is None else checked_range(value, *NUMBERS[param], param=param)


def _checked_logprobs(value: int | None, param: str) -> int | None:
    return None if value is None else _integer(value, param)


def _checked_stop_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if not token_ids:
        return ()
    checked_count(len(token_ids), MAX_STOP_TOKEN_IDS, param="stop_token_ids", what="ids")
    return checked_token_ids(tuple(dict.fromkeys(token_ids)), vocab_size, param="stop_token_ids")


def checked_allowed(token_ids: Sequence[int] | None, vocab_size: int) -> bytes:
    """Return the only tokens that a form allows, as workers get them; empty = all are."""
    if token_ids is None:
        return b""
    if not token_ids:
        raise refusal("allowed_token_ids", "must name a token")
    checked = checked_token_ids(token_ids, vocab_size, param="allowed_token_ids")
    return pack_u32(sorted(set(checked)))


def _checked_bias(
    bias: Sequence[tuple[int, float]], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    checked_count(len(bias), MAX_LOGIT_BIAS, param="logit_bias")
    checked_token_ids([token_id for token_id, _ in bias], vocab_size, param="logit_bias")
    return tuple(
        (token_id, checked_range(value, *NUMBERS["logit_bias"], param="logit_bias"))
        for token_id, value in sorted(bias)
    )
