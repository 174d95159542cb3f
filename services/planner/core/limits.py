"""What binds: which limit is missed, or would be first, and which part of a mesh is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FULL: Final = 0.95
"""Share of a pool of blocks that counts as full: the next prompt does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """What a run tells of limits.

    late, slow, unserved: shares of all requests that missed TTFT, that missed TPOT, and that got no
    whole answer; refused: of those, by the gateway's admission. ttft_use, tpot_use: what those that
    must keep their limit felt at worst, over it. prompt_busy, answer_busy: of the time from the
    first arrival to the last token, the share in which the busiest worker for prompts and for
    answers ran steps, however small. kv_use: blocks held at most, of a pool of a worker for
    answers.
    """

    late: float
    slow: float
    unserved: float
    refused: float
    ttft_use: float
    tpot_use: float
    prompt_busy: float
    answer_busy: float
    kv_use: float
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """name: ttft or tpot. phase: prefill, decode, blocks or one request. why: a sentence."""

    name: str
    phase: str
    why: str


def binding_limit(felt: Felt) -> Limit:
    """Return which limit binds, and why."""
    if felt.unserved > max(felt.late, felt.slow):
        why = f"{felt.unserved:.1%} of the requests were not served"
        if felt.refused <= felt.unserved / 2:
            return Limit("capacity", "blocks", why)
        return Limit("capacity", "gateway", f"{why}: its gateway refused {felt.refused:.1%}")
    is_ttft = (felt.late, felt.ttft_use) >= (felt.slow, felt.tpot_use)
    share, use = (felt.late, felt.ttft_use) if is_ttft else (felt.slow, felt.tpot_use)
    name = "TTFT" if is_ttft else "TPOT"
    seen = (
        f"{share:.1%} of the requests miss it"
        if share
        else f"{use:.0%} of it is used, no one misses"
    )
    phase, busy = _phase(felt, is_ttft=is_ttft)
    return Limit(name.lower(), phase, f"{name}: {seen}; {busy}")


def _phase(felt: Felt, *, is_ttft: bool) -> tuple[str, str]:
    if felt.kv_use >= FULL and is_ttft and felt.answer_busy >= felt.prompt_busy:
        return "blocks", f"KV blocks for answers are full ({felt.kv_use:.0%}): prompts wait"
    if felt.is_mixed:
        return "mixed", f"the busiest worker computes {felt.answer_busy:.0%} of the time"
    if is_ttft:
        return "prefill", f"the busiest prefill worker computes {felt.prompt_busy:.0%} of the time"
    return "decode", f"the busiest decode worker computes {felt.answer_busy:.0%} of the time"
