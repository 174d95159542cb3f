"""One answer's stream of events: told once each, and from here to log lines, spans, metrics and the
receipt.

The gateway owns the clock; workers report durations, which need no clocks that agree. The
arithmetic is ``shared/telemetry/lifetime.py``; here is only who reports what, and when it counts:
the phases of TTFT are those of the attempt that brought the first token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from services.gateway.core.routing.decision_record import chosen, record_of
from services.gateway.core.routing.routing import RouteDecision
from shared.errors import MeshError
from shared.log import is_debugging
from shared.request import FinishReason
from shared.runtime.loops import loop_time
from shared.schedule.plan import PromptTimes
from shared.telemetry.lifetime import Marks, Receipt, receipt_of
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import CANCELLED, NO_SPAN, TraceSpan


class Transfer(NamedTuple):
    """How an attempt's KV moved. mode: '' = decode's word alone, see ``Timeline.joined``."""

    num_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    lane: str = ""
    mode: str = ""


NO_TRANSFER = Transfer()
_COLOCATED = Transfer(mode="colocated")


class AnswerWatcher:
    """Who hears of every answer of this gateway; each call is on the loop and returns at once. Of
    what it does not care for it has no method.

    now: loop time.
    """

    def dispatched(self, now: float) -> None:
        """An attempt goes to its workers."""

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """An answer begins."""

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        """So many tokens after an answer's first came together, at least one. gap_s: their gaps to
        the tokens before them, added up; each token has an equal share."""

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None:
        """All KV of an attempt has moved."""

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        """An answer is over. error: type of what ended it, ``CANCELLED`` if its client left, '' if
        it is whole."""


class Timeline:
    """One answer's events. arrived_at: loop time. span: of the request that asked for it."""

    def __init__(
        self,
        arrived_at: float,
        *,
        request_id: bytes = b"",
        prompt_tokens: int = 0,
        watchers: tuple[AnswerWatcher, ...] = (),
        span: TraceSpan = NO_SPAN,
    ) -> None:
        self.cached_tokens = 0
        self._marks = Marks(arrived_at)
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._watchers = watchers
        self._span = span
        self._attempt = NO_SPAN
        self._attempts = 0
        self._output_tokens = 0
        self._errors: list[str] = []
        self._is_abandoned = False
        self._reason = ""
        self._error = ""
        self._decision: RouteDecision | None = None
        self._predicted_ttft_s: float | None = None
        self._predicted_cached_tokens = 0
        self._decisions: list[tuple[float, RouteDecision]] = []
        self._has_decode = False
        self._transfer = NO_TRANSFER
        self._is_transfer_told = True
        self._decode_cached_tokens = 0
        self._reserve_wait_s = 0.0
        self._prompt = PromptTimes(0.0, 0.0, 0)
        self._receipt: Receipt | None = None
        self._waiting_since = arrived_at
        self._prefilled_at = math.inf

    @property
    def first_token_at(self) -> float | None:
        """Loop time at which the first token was handed on; None = not yet."""
        return self._marks.first_token_at

    # --- the way in -----------------------------------------------------------------------------

    def admitted(self) -> None:
        """A place in the gateway is ours."""
        self._span.phase("queue", self._waiting_since)
        self._marks.admitted_at = self._waiting_since = loop_time()
        note(Moment.ADMITTED, self._request_id)

    def refused(self, error: MeshError | None) -> None:
        """There was no place in time, or the client left before (None); nothing follows."""
        self._is_abandoned = error is None
        reason = CANCELLED if error is None else error.type
        self._span.phase("queue", self._waiting_since, error=reason)
        self._tell_end(error)

    # --- attempts -------------------------------------------------------------------------------

    def dispatched(self, decision: RouteDecision, *, has_decode: bool) -> str:
        """The legs of an attempt are about to be sent; return the trace context to send with
        them."""
        now = loop_time()
        self._attempts += 1
        if self._marks.dispatched_at is None:
            self._marks.dispatched_at = now
        if self._marks.first_token_at is None:
            self._marks.last_dispatched_at = now
            expected = decision.prediction
            # From arrival on, as the real one: what it has waited until now is in both.
            self._predicted_ttft_s = expected and now - self._marks.arrived_at + expected.ttft_s
            self._predicted_cached_tokens = decision.num_cached
        self._decision, self._has_decode = decision, has_decode
        self._decisions.append((now, decision))
        for watcher in self._watchers:
            watcher.dispatched(now)
        self._transfer = _COLOCATED if decision.is_colocated else NO_TRANSFER
        self._is_transfer_told = True
        self._prefilled_at = math.inf
        if is_debugging():
            attempt = self._attempts - 1
            prefill, decode = self._workers
            note(
                Moment.ROUTED, self._request_id, at_s=now, attempt=attempt, prefill=prefill,
                decode=decode, decision=chosen(decision),
            )  # fmt: skip
            note(Moment.DISPATCHED, self._request_id, attempt=attempt)
        if not self._span.is_recording:
            return ""
        self._span.phase("route", self._waiting_since, {"pdmesh.policy": decision.policy})
        prefill, decode = self._workers
        workers = {"pdmesh.prefill": prefill, "pdmesh.decode": decode}
        self._attempt = self._span.begin(
            "attempt", now, {"pdmesh.attempt": self._attempts, **workers}, is_call=True
        )
        return self._attempt.context

    @property
    def _workers(self) -> tuple[str, str]:
        """Who prefills and who decodes, as text; '' = nobody."""
        if self._decision is None:
            return "", ""
        decode = f"{self._decision.decode:016x}" if self._has_decode else ""
        return f"{self._decision.prefill:016x}", decode

    def attempt_failed(self, error: MeshError) -> None:
        """An attempt brings no more; what follows is another one or the end."""
        self._attempt.end(error=error.type)
        self._attempt = NO_SPAN
        self._waiting_since = loop_time()

    def rerouted(self, error: MeshError) -> None:
        """After an attempt that failed so, another follows."""
        self._errors.append(error.type)

    def prefilled(self, times: PromptTimes) -> None:
        """Prefill's own times, with an attempt's first token."""
        self._prefilled_at = loop_time()
        if self._marks.first_token_at is None:
            self._prompt = times
            self._marks.prefill_queue_s, self._marks.prefill_s = times.queue_s, times.compute_s
            self.cached_tokens = times.cached_tokens

    def granted(self, *, cached_tokens: int, wait_s: float) -> None:
        self._decode_cached_tokens = cached_tokens
        self._reserve_wait_s = wait_s

    def pushed(self, transfer: Transfer) -> None:
        """Prefill says that all KV was acknowledged."""
        self._transfer = transfer
        self._tell_transfer()

    def joined(self, *, num_bytes: int, receive_s: float, lane: str) -> None:
        """Decode says that it has all KV. Prefill knows better, but a short answer may be over
        before it has said so."""
        if not self._transfer.mode:
            # Over two streams: it may come before the token, and nothing was exposed then.
            exposed_s = max(0.0, loop_time() - self._prefilled_at)
            self._transfer = Transfer(num_bytes, receive_s, exposed_s, lane)
            self._is_transfer_told = False

    def _tell_transfer(self) -> None:
        self._is_transfer_told = True
        if self._transfer.num_bytes and self._decision is not None:
            now = loop_time()
            for watcher in self._watchers:
                watcher.transferred(now, self._decision, self._transfer)

    # --- tokens ---------------------------------------------------------------------------------

    def emitted(self, now: float, num_tokens: int) -> tuple[float, int]:
        """Tokens, at least one, were handed to the client's side.

        Returns when the token before them was handed on, and how many they are; if the first one is
        among them: now, and how many others. The caller tells the watchers of these, for many
        answers at once (``delivery.py``).
        """
        if is_debugging():
            index = self._output_tokens
            note(Moment.EMITTED, self._request_id, index=index, num_tokens=num_tokens)
        self._output_tokens += num_tokens
        last_at, self._marks.last_token_at = self._marks.last_token_at, now
        if last_at is None:
            last_at = self._marks.first_token_at = now
            num_tokens -= 1
            for watcher in self._watchers:
                watcher.first_token(
                    now,
                    ttft_s=now - self._marks.arrived_at,
                    prompt_tokens=self._prompt_tokens,
                    cached_tokens=self.cached_tokens,
                )
        if num_tokens and self._marks.second_token_at is None:
            self._marks.second_token_at = now
        return last_at, num_tokens

    # --- the end --------------------------------------------------------------------------------

    def abandoned(self) -> None:
        self._is_abandoned = True

    def ended(self, error: MeshError | None, finish: FinishReason = FinishReason.NONE) -> None:
        """Nothing follows; without an error the answer is whole, or the client left."""
        if is_debugging():
            note(Moment.ENDED, self._request_id, finish_reason=finish.name.lower())
        self._tell_end(error)

    def _tell_end(self, error: MeshError | None) -> None:
        now = self._marks.ended_at = loop_time()
        if error is not None:
            self._errors.append(error.type)
            self._error = error.message
        reason = error.type if error is not None else CANCELLED if self._is_abandoned else ""
        self._reason = reason
        # No attempt was under way, so none has a span that tells why it ended.
        if reason and self._marks.admitted_at is not None and self._attempt is NO_SPAN:
            self._span.phase("route", self._waiting_since, error=reason)
        self._attempt.end(error=reason)
        if not self._is_transfer_told:
            self._tell_transfer()
        receipt = self._receipt = self.receipt()
        for watcher in self._watchers:
            watcher.ended(now, receipt, reason)

    def explanation(self) -> dict[str, Any]:
        """Return why each attempt went where it went, what ended it ('' = nothing did but its
        last token), and the receipt as of now; JSON-ready."""
        return {
            "request_id": self._request_id.hex(),
            "ended": self._marks.ended_at is not None,
            "error": self._error or ("its client left" if self._reason else ""),
            "decisions": [
                record_of(decision, attempt=attempt, at_s=at)
                for attempt, (at, decision) in enumerate(self._decisions)
            ],
            "receipt": self.receipt().as_dict(),
        }

    def told(self, since: float) -> dict[str, Any]:
        """Return what became of the request, JSON-ready. since: the loop time that counts as 0."""
        return {
            "request_id": self._request_id.hex(),
            "arrived_s": round(self._marks.arrived_at - since, 6),
            "ended": self._marks.ended_at is not None,
            "error": self._reason,
            "receipt": self.receipt().as_dict(),
        }

    def receipt(self) -> Receipt:
        """Return the receipt as of now; complete after ``ended``, and then the same for all."""
        if self._receipt is not None:
            return self._receipt
        num_bytes, transfer_s, exposed_s, lane, mode = self._transfer
        prefill, decode = self._workers
        prompt = self._prompt
        fetch = None if self._decision is None else self._decision.fetch
        return receipt_of(
            self._marks,
            output_tokens=self._output_tokens,
            attempts=self._attempts,
            cached_tokens=self.cached_tokens,
            errors=tuple(self._errors),
            predicted_ttft_s=self._predicted_ttft_s,
            predicted_cached_tokens=self._predicted_cached_tokens,
            prompt_tokens=self._prompt_tokens,
            prefill=prefill,
            decode=decode,
            prefill_pool="" if self._decision is None else self._decision.prefill_pool,
            decode_pool="" if self._decision is None or not decode else self._decision.decode_pool,
            decision=None if self._decision is None else chosen(self._decision),
            fetched_tokens=prompt.fetched_tokens,
            fetched_bytes=prompt.fetched_bytes,
            fetch_s=prompt.fetch_s,
            fetched_from="" if fetch is None else f"{fetch.source:016x}",
            dram_tokens=prompt.dram_tokens,
            ssd_tokens=prompt.ssd_tokens,
            load_s=prompt.load_s,
            decode_cached_tokens=self._decode_cached_tokens,
            reserve_wait_s=self._reserve_wait_s,
            transfer_bytes=num_bytes,
            transfer_s=transfer_s,
            transfer_exposed_s=exposed_s,
            # None takes less than a nanosecond: what is told of one must end nothing here.
            gb_per_s=num_bytes / max(transfer_s, 1e-9) / 1e9 if transfer_s > 0 else 0.0,
            lane=lane,
            mode=mode,
        )
