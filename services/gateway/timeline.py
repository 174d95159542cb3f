"""Where one request's time goes: collects the marks from which its receipt is made.

The gateway owns the clock; workers report durations, which need no clocks that agree. The
arithmetic is ``shared/telemetry/lifetime.py``; here is only who reports what, and when it counts:
the phases of TTFT are those of the attempt that brought the first token.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.core.routing import RouteDecision
from shared.errors import MeshError
from shared.telemetry.lifetime import Marks, Receipt, receipt_of


class Timeline:
    """One request's marks. arrived_at: loop time."""

    def __init__(self, arrived_at: float) -> None:
        self.cached_tokens = 0
        self._marks: dict[str, float] = {"arrived_at": arrived_at}
        self._facts: dict[str, Any] = {}
        self._errors: list[str] = []

    def admitted(self) -> None:
        """A place in the gateway is ours."""
        self._marks["admitted_at"] = _now()

    def dispatched(self, decision: RouteDecision, *, has_decode: bool) -> None:
        """The legs of an attempt were sent."""
        now = _now()
        self._marks.setdefault("dispatched_at", now)
        if "first_token_at" not in self._marks:
            self._marks["last_dispatched_at"] = now
        self._facts["prefill"] = f"{decision.prefill:016x}"
        self._facts["decode"] = f"{decision.decode:016x}" if has_decode else ""

    def rerouted(self, error: MeshError) -> None:
        """An attempt failed and another follows."""
        self._errors.append(error.type)

    def prefilled(self, *, queue_s: float, compute_s: float, cached_tokens: int) -> None:
        """Prefill's own times, with an attempt's first token."""
        if "first_token_at" not in self._marks:
            self._marks["prefill_queue_s"], self._marks["prefill_s"] = queue_s, compute_s
            self.cached_tokens = cached_tokens

    def granted(self, *, cached_tokens: int, wait_s: float) -> None:
        """Decode has room."""
        self._facts["decode_cached_tokens"] = cached_tokens
        self._facts["reserve_wait_s"] = wait_s

    def pushed(
        self, *, num_bytes: int, transfer_s: float, exposed_s: float, lane: str, mode: str
    ) -> None:
        """All KV was acknowledged."""
        self._facts |= {
            "transfer_bytes": num_bytes,
            "transfer_s": transfer_s,
            "transfer_exposed_s": exposed_s,
            "gb_per_s": num_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0,
            "lane": lane,
            "mode": mode,
        }

    def emitted(self, num_tokens: int) -> None:
        """Tokens were handed to the client's side."""
        marks = self._marks
        now = marks["last_token_at"] = _now()
        if "first_token_at" not in marks:
            marks["first_token_at"] = now
            num_tokens -= 1
        if num_tokens:
            marks.setdefault("second_token_at", now)

    def ended(self, error: MeshError | None) -> None:
        """Nothing follows."""
        self._marks["ended_at"] = _now()
        if error is not None:
            self._errors.append(error.type)

    def receipt(self, *, attempts: int, output_tokens: int) -> Receipt:
        """Return the receipt as of now; complete after ``ended``."""
        return receipt_of(
            Marks(**self._marks),
            output_tokens=output_tokens,
            attempts=attempts,
            cached_tokens=self.cached_tokens,
            errors=tuple(self._errors),
            **self._facts,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
