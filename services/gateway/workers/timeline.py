"""Where one answer's time goes: collects the marks from which its receipt is made, and passes what
happens on, as it happens, to metrics and traces.

The gateway owns the clock; workers report durations, which need no clocks that agree. The
arithmetic is ``shared/telemetry/lifetime.py``; here is only who reports what, and when it counts:
the phases of TTFT are those of the attempt that brought the first token.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from services.gateway.core.routing import RouteDecision
from shared.errors import MeshError
from shared.telemetry.lifetime import Marks, Receipt, receipt_of
from shared.telemetry.tracing import CANCELLED, NO_SPAN, SpanKind, TraceSpan

_TRANSFER_FACTS = (
    "transfer_bytes", "transfer_s", "transfer_exposed_s", "gb_per_s", "lane", "mode"
)  # fmt: skip
"""Of the attempt that is told last."""


class AnswerWatcher(Protocol):
    """Who hears of every answer of this gateway; each call is on the loop and returns at once.

    now: loop time.
    """

    def first_token(self, now: float, receipt: Receipt) -> None:
        """An answer begins: TTFT and its phases will not change."""
        ...

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        """So many tokens after an answer's first came together, at least one. gap_s: their gaps to
        the tokens before them, added up; each token has an equal share."""
        ...

    def transferred(self, now: float, receipt: Receipt) -> None:
        """All KV of an attempt has moved: the receipt's transfer will not change any more."""
        ...

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        """An answer is over. error: type of what ended it, ``CANCELLED`` if its client left, '' if
        it is whole."""
        ...


class Timeline:
    """One answer's marks. arrived_at: loop time. span: of the request that asked for it."""

    def __init__(
        self,
        arrived_at: float,
        *,
        prompt_tokens: int = 0,
        watchers: tuple[AnswerWatcher, ...] = (),
        span: TraceSpan = NO_SPAN,
    ) -> None:
        self.cached_tokens = 0
        self._watchers = watchers
        self._span = span
        self._attempt = NO_SPAN
        self._attempts = 0
        self._output_tokens = 0
        self._waiting_since = arrived_at
        self._prefilled_at = arrived_at
        self._is_transfer_told = True
        self._is_abandoned = False
        self._last_token_at: float | None = None
        self._marks: dict[str, float] = {"arrived_at": arrived_at}
        self._facts: dict[str, Any] = {"prompt_tokens": prompt_tokens}
        self._errors: list[str] = []

    @property
    def first_token_at(self) -> float | None:
        """Loop time at which the first token was handed on; None = not yet."""
        return self._marks.get("first_token_at")

    def admitted(self) -> None:
        """A place in the gateway is ours."""
        self._span.phase("queue", self._waiting_since)
        self._marks["admitted_at"] = self._waiting_since = _now()

    def refused(self, error: MeshError | None) -> None:
        """There was no place in time, or the client left before (None); nothing follows."""
        self._is_abandoned = error is None
        reason = CANCELLED if error is None else error.type
        self._span.phase("queue", self._waiting_since, error=reason)
        self.ended(error)

    def dispatched(self, decision: RouteDecision, *, has_decode: bool) -> str:
        """The legs of an attempt are sent; return the trace context to send with them."""
        now = _now()
        self._attempts += 1
        self._marks.setdefault("dispatched_at", now)
        if "first_token_at" not in self._marks:
            self._marks["last_dispatched_at"] = now
        facts = self._facts
        facts["prefill"] = f"{decision.prefill:016x}"
        facts["decode"] = f"{decision.decode:016x}" if has_decode else ""
        for name in _TRANSFER_FACTS:
            facts.pop(name, None)
        if decision.is_colocated:
            facts["mode"] = "colocated"
        self._is_transfer_told = True
        if not self._span.is_recording:
            return ""
        self._span.phase("route", self._waiting_since, {"pdmesh.policy": decision.policy})
        workers = {"pdmesh.prefill": facts["prefill"], "pdmesh.decode": facts["decode"]}
        self._attempt = self._span.begin(
            "attempt", now, {"pdmesh.attempt": self._attempts, **workers}, kind=SpanKind.CLIENT
        )
        return self._attempt.context

    def attempt_failed(self, error: MeshError) -> None:
        """An attempt brings no more; what follows is another one or the end."""
        self._attempt.end(error=error.type)
        self._attempt = NO_SPAN
        self._waiting_since = _now()

    def rerouted(self, error: MeshError) -> None:
        """After an attempt that failed so, another follows."""
        self._errors.append(error.type)

    def prefilled(self, *, queue_s: float, compute_s: float, cached_tokens: int) -> None:
        """Prefill's own times, with an attempt's first token."""
        self._prefilled_at = _now()
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
        """Prefill says that all KV was acknowledged."""
        self._note_transfer(num_bytes, transfer_s, exposed_s, lane, mode)
        self._tell_transfer()

    def joined(self, *, num_bytes: int, receive_s: float, lane: str) -> None:
        """Decode says that it has all KV. Prefill knows better, but a short answer may be over
        before it has said so."""
        if "mode" not in self._facts:
            self._note_transfer(num_bytes, receive_s, _now() - self._prefilled_at, lane, "")
            self._is_transfer_told = False

    def _note_transfer(
        self, num_bytes: int, transfer_s: float, exposed_s: float, lane: str, mode: str
    ) -> None:
        self._facts |= {
            "transfer_bytes": num_bytes,
            "transfer_s": transfer_s,
            "transfer_exposed_s": exposed_s,
            "gb_per_s": num_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0,
            "lane": lane,
            "mode": mode,
        }

    def _tell_transfer(self) -> None:
        self._is_transfer_told = True
        if self._facts["transfer_bytes"]:
            now, receipt = _now(), self.receipt()
            for watcher in self._watchers:
                watcher.transferred(now, receipt)

    def emitted(self, num_tokens: int) -> None:
        """Tokens, at least one, were handed to the client's side."""
        marks = self._marks
        now = _now()
        last_at, self._last_token_at = self._last_token_at, now
        self._output_tokens += num_tokens
        if last_at is None:
            last_at = marks["first_token_at"] = now
            num_tokens -= 1
            receipt = self.receipt()
            for watcher in self._watchers:
                watcher.first_token(now, receipt)
        if num_tokens:
            marks.setdefault("second_token_at", now)
            for watcher in self._watchers:
                watcher.later_tokens(now, num_tokens, now - last_at)

    def stepped(self, now: float) -> float:
        """One more token, not the first, was handed on; return when the one before was. Who calls
        it tells the watchers: of many answers at once (``delivery.py``)."""
        last_at, self._last_token_at = self._last_token_at, now
        assert last_at is not None
        self._output_tokens += 1
        self._marks.setdefault("second_token_at", now)
        return last_at

    def abandoned(self) -> None:
        """The client left before the end."""
        self._is_abandoned = True

    def ended(self, error: MeshError | None) -> None:
        """Nothing follows; without an error the answer is whole, or the client left."""
        now = self._marks["ended_at"] = _now()
        if error is not None:
            self._errors.append(error.type)
        reason = error.type if error is not None else CANCELLED if self._is_abandoned else ""
        if reason and "admitted_at" in self._marks and self._attempt is NO_SPAN:
            self._span.phase("route", self._waiting_since, error=reason)
        self._attempt.end(error=reason)
        if not self._is_transfer_told:
            self._tell_transfer()
        receipt = self.receipt()
        for watcher in self._watchers:
            watcher.ended(now, receipt, reason)

    def receipt(self) -> Receipt:
        """Return the receipt as of now; complete after ``ended``."""
        marks = self._marks
        if self._last_token_at is not None:
            marks["last_token_at"] = self._last_token_at
        return receipt_of(
            Marks(**marks),
            output_tokens=self._output_tokens,
            attempts=self._attempts,
            cached_tokens=self.cached_tokens,
            errors=tuple(self._errors),
            **self._facts,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
