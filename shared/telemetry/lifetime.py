"""One request's life as numbers: the receipt, whose phases add up to TTFT by construction.

    arrived ─queue─ admitted ─route─ dispatched ─retry─ dispatched ─prefill queue─prefill─hand-over─
                                     (first)            (last)                     token 1 leaves ─┘

The gateway owns the clock: its marks are loop times of one process. Workers report durations,
which need no clocks that agree; what they do not explain of the time since the last dispatch is
hand-over (messages, loops, streams). Pure: no clock is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.telemetry.definitions import tpot

TTFT_PHASES = ("queue_s", "route_s", "retry_s", "prefill_queue_s", "prefill_s", "handover_s")
"""In order of time; their sum is ``ttft_s``."""


@dataclass(slots=True)
class Marks:
    """When things happened at the gateway, in loop time; None = not yet, or never.

    dispatched: the first attempt was sent; last_dispatched: the one that brought token 1.
    prefill_queue_s, prefill_s: durations that the prefill worker reported with token 1.
    """

    arrived_at: float
    admitted_at: float | None = None
    dispatched_at: float | None = None
    last_dispatched_at: float | None = None
    first_token_at: float | None = None
    second_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0


class Receipt(NamedTuple):
    """Where one request's time went, in seconds; the six phases of TTFT, then the rest.

    queue_s: waited for a place in the gateway. route_s: waited for a pair of workers and chose it.
    retry_s: lost to attempts that failed before token 1. prefill_queue_s: waited on the prefill
    worker. prefill_s: first step of the prompt to token 1. handover_s: all the rest until token 1
    left the gateway. first_step_s: token 1 to token 2, which hides what was left of the transfer.
    transfer_exposed_s: from token 1 sampled until KV was acknowledged. reserve_wait_s: waited for
    blocks on decode, beside prefill. tpot_s: mean gap after token 1. prefill_pool, decode_pool:
    what the two workers were when they were chosen: prompt, token or mixed. decision: the policy,
    and the two workers' scores with their terms, None = none was made. predicted_ttft_s: what
    was expected when the attempt that brought token 1 was dispatched, with predicted_cached_tokens
    of the prompt cached. fetched_tokens: of the cached
    ones, those that another worker's cache sent for this prompt; fetch_s lies in prefill_queue_s.
    fetched_from: whom that was asked of. dram_tokens, ssd_tokens: of the cached ones, those that
    came from below the prefill worker's pool; load_s likewise.
    """

    queue_s: float = 0.0
    route_s: float = 0.0
    retry_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_cached_tokens: int = 0
    first_step_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0
    reserve_wait_s: float = 0.0
    transfer_bytes: int = 0
    gb_per_s: float = 0.0
    lane: str = ""
    mode: str = ""
    prefill: str = ""
    decode: str = ""
    prefill_pool: str = ""
    decode_pool: str = ""
    decision: Mapping[str, Any] | None = None
    attempts: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    fetched_from: str = ""
    dram_tokens: int = 0
    ssd_tokens: int = 0
    load_s: float = 0.0
    decode_cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    errors: tuple[str, ...] = ()

    @property
    def ttft_phases(self) -> tuple[float, ...]:
        """The phases of TTFT as ``TTFT_PHASES`` names them; they sum to ``ttft_s`` if there was a
        token."""
        return self[:6]

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Return the cached tokens by where they lay: in the worker's pool, below it, or in another
        worker's cache ('peer')."""
        below = self.fetched_tokens + self.dram_tokens + self.ssd_tokens
        return {
            "pool": max(0, self.cached_tokens - below),
            "dram": self.dram_tokens,
            "ssd": self.ssd_tokens,
            "peer": self.fetched_tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form: microsecond resolution, unknown times left out.

        The rounded phases still add up to the rounded ``ttft_s``: hand-over takes the remainder.
        """
        record: dict[str, Any] = {
            # To whole microseconds: a fifth of what ``round(value, 6)`` takes.
            name: round(value * 1e6) / 1e6 if type(value) is float else value
            for name, value in zip(self._fields, self, strict=True)
            if value is not None
        }
        if self.ttft_s is not None:
            others = sum(record[name] for name in TTFT_PHASES if name != "handover_s")
            # Six rounded phases would miss the rounded sum by a few microseconds.
            record["handover_s"] = round(record["ttft_s"] - others, 6)
        record["errors"] = list(self.errors)
        return record

    def as_json(self) -> str:
        """Return ``as_dict`` as printable ASCII JSON, fit for a gRPC trailer."""
        return json.dumps(self.as_dict(), separators=(",", ":"))


def receipt_of(marks: Marks, *, output_tokens: int = 0, **facts: Any) -> Receipt:
    """Turn marks into a receipt; ``facts`` are further fields of Receipt.

    A mark that is missing takes the latest earlier one, so a request that ended early has zero
    phases where it never was. Without a first token the phases run to ``ended_at`` and no TTFT is
    given. Worker durations that claim more than the gateway waited are scaled down to what it did.
    """
    admitted_at = _or(marks.admitted_at, marks.arrived_at)
    dispatched_at = _or(marks.dispatched_at, admitted_at)
    last_dispatched_at = _or(marks.last_dispatched_at, dispatched_at)
    end_at = _or(marks.first_token_at, _or(marks.ended_at, last_dispatched_at))
    waited_s = max(0.0, end_at - last_dispatched_at)
    claimed_s = marks.prefill_queue_s + marks.prefill_s
    # Another host's clock may run a little faster, and a worker may be wrong: phases must not add
    # up to more than was waited.
    scale = waited_s / claimed_s if claimed_s > waited_s else 1.0
    prefill_queue_s, prefill_s = marks.prefill_queue_s * scale, marks.prefill_s * scale
    ttft_s = first_step_s = tpot_s = None
    if marks.first_token_at is not None:
        ttft_s = marks.first_token_at - marks.arrived_at
        if marks.second_token_at is not None:
            first_step_s = marks.second_token_at - marks.first_token_at
        if marks.last_token_at is not None and output_tokens > 1:
            tpot_s = tpot(marks.first_token_at, marks.last_token_at, output_tokens)
    return Receipt(
        queue_s=admitted_at - marks.arrived_at,
        route_s=dispatched_at - admitted_at,
        retry_s=last_dispatched_at - dispatched_at,
        prefill_queue_s=prefill_queue_s,
        prefill_s=prefill_s,
        handover_s=waited_s - prefill_queue_s - prefill_s,
        ttft_s=ttft_s,
        first_step_s=first_step_s,
        tpot_s=tpot_s,
        e2e_s=None if marks.ended_at is None else marks.ended_at - marks.arrived_at,
        output_tokens=output_tokens,
        **facts,
    )


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
