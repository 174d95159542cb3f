"""Where one request's time went, as its receipt: phases that add up to TTFT by construction.

    arrived ─queue─ admitted ─route─ dispatched ─retry─ dispatched ─prefill queue─ ─prefill─ ─hand-over─ token 1 leaves
                                     (first)            (last)

The gateway owns the clock; workers report durations, which do not need clocks that agree. Hand-over is what remains
between the dispatch and the first token once the worker's own times are taken off: messages, loops and streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.core.routing import RouteDecision
from shared.errors import MeshError
from shared.telemetry.lifetime import Receipt


class Timeline:
    """Collects one request's marks. arrived_at: loop time."""

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._admitted_at = arrived_at
        self._first_dispatch_at = arrived_at
        self._dispatched_at = arrived_at
        self._first_token_at: float | None = None
        self._second_token_at: float | None = None
        self._last_token_at = arrived_at
        self._ended_at: float | None = None
        self._joined_at: float | None = None
        self._num_dispatches = 0
        self._num_emitted = 0
        self._prefill_queue_s = 0.0
        self._prefill_s = 0.0
        self._decode: RouteDecision | None = None
        self._errors: list[str] = []
        self._push: dict[str, Any] = {}
        self._decode_cached_tokens = 0
        self._reserve_wait_s = 0.0
        self.cached_tokens = 0

    def admitted(self) -> None:
        """A place is ours."""
        self._admitted_at = self._first_dispatch_at = self._dispatched_at = _now()

    def dispatched(self, decision: RouteDecision) -> None:
        """Both legs were sent."""
        self._dispatched_at = _now()
        if self._num_dispatches == 0:
            self._first_dispatch_at = self._dispatched_at
        self._num_dispatches += 1
        self._decode = decision

    def rerouted(self, error: MeshError) -> None:
        """An attempt failed and another follows."""
        self._errors.append(error.type)

    def prefilled(self, *, queue_s: float, compute_s: float, cached_tokens: int) -> None:
        """Prefill's own times, with the first attempt's first token."""
        if self._first_token_at is None:
            self._prefill_queue_s, self._prefill_s = queue_s, compute_s
            self.cached_tokens = cached_tokens

    def granted(self, *, cached_tokens: int, wait_s: float) -> None:
        """Decode has room."""
        self._decode_cached_tokens, self._reserve_wait_s = cached_tokens, wait_s

    def pushed(
        self, *, num_bytes: int, transfer_s: float, exposed_s: float, lane: str, mode: str
    ) -> None:
        """KV was acknowledged."""
        self._push = {
            "bytes": num_bytes,
            "transfer_s": transfer_s,
            "transfer_exposed_s": exposed_s,
            "gb_per_s": num_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0,
            "lane": lane,
            "mode": mode,
        }

    def joined(self) -> None:
        """Decode has all KV."""
        self._joined_at = _now()

    def emitted(self, num_tokens: int) -> None:
        """Tokens were handed to the client's side."""
        now = _now()
        if self._first_token_at is None:
            self._first_token_at = now
            if num_tokens > 1:
                self._second_token_at = now
        elif self._second_token_at is None:
            self._second_token_at = now
        self._last_token_at = now
        self._num_emitted += num_tokens

    def ended(self, error: MeshError | None) -> None:
        """Nothing follows."""
        self._ended_at = _now()
        if error is not None:
            self._errors.append(error.type)

    def receipt(self, *, attempts: int, num_output_tokens: int) -> dict[str, Any]:
        """Return the receipt, JSON-ready; durations in seconds, rounded to microseconds."""
        first_at = self._first_token_at
        ttft_s = None if first_at is None else first_at - self._arrived_at
        handover_s = None
        if first_at is not None:
            since_dispatch = first_at - self._dispatched_at
            # A retry after the first token leaves the phases of the attempt that brought it.
            handover_s = since_dispatch - self._prefill_queue_s - self._prefill_s
        return Receipt(
            queue_s=self._admitted_at - self._arrived_at,
            route_s=self._first_dispatch_at - self._admitted_at,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
