"""What token 1 will take, added up from what workers report; and how far that can be trusted.

    TTFT = waited here + queue as reported, less what has passed since + own orders that the report
           has not seen + what a prefix that is fetched or loaded takes longer + prefill of the
           rest + hand-over

The gateway learns no step times: each worker fits its own, where it sees them without queueing, and
sends coefficients. Here only the hand-over (messages, loops, streams) is learned, from this
gateway's own answers. A worker whose predictions were wrong for a while is not believed: policies
that compare seconds take it by its load alone. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.core.index.fetches import FetchTimes
from services.gateway.core.worker import Worker
from shared.ids import Incarnation
from shared.predict.output_length import OutputLengths
from shared.predict.quantiles import RunningQuantiles
from shared.predict.transfer import TransferTimes

WRONG = 0.3
"""A worker's predictions are wrong while half of them are off by more than this share."""

WRONG_S = 60.0
"""So long may they be wrong until it is not believed; and errors older than this do not count."""

LEAST_ANSWERS = 8
"""Fewer errors say nothing of a worker."""

_MOST_ANSWERS = 256
_HANDOVERS = 64


class Prediction(NamedTuple):
    """What one decision was expected to bring, in seconds. fetch_s: what a prefix that another
    worker sends takes beyond the queue; load_s: one that lies below the worker's pool. transfer_s:
    KV from prefill to decode, which follows token 1 in part; num_output_tokens: how long such
    answers are, half of them; both None = nothing is known."""

    queue_s: float
    own_s: float
    prefill_s: float
    handover_s: float
    fetch_s: float = 0.0
    load_s: float = 0.0
    transfer_s: float | None = None
    num_output_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """From the decision to token 1."""
        return (
            self.queue_s
            + self.own_s
            + self.fetch_s
            + self.load_s
            + self.prefill_s
            + self.handover_s
        )


class EndedAnswer(NamedTuple):
    """An answer that is over, as its last attempt was. handover_s: of its token 1; ttft_s
    None = it has none. fetched_from: whom the prompt's worker was told to fetch from, None =
    nobody."""

    prefill: Incarnation
    decode: Incarnation
    is_whole: bool
    num_attempts: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    predicted_ttft_s: float | None
    handover_s: float
    cached_tokens: int
    predicted_cached_tokens: int
    fetched_from: Incarnation | None = None
    fetched_bytes: int = 0
    fetch_s: float = 0.0


@dataclass(slots=True)
class _Record:
    """Errors of one worker's predictions. errors: with the time of each."""

    errors: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=_MOST_ANSWERS)
    )
    wrong_since: float | None = None
    is_believed: bool = True


class Expectations:
    """One gateway's. ``answered`` is an event; all else asks."""

    def __init__(self) -> None:
        self.transfers = TransferTimes()
        self.fetches = FetchTimes()
        self.lengths = OutputLengths()
        self._handovers = {kind: RunningQuantiles(_HANDOVERS) for kind in (False, True)}
        self._records: dict[Incarnation, _Record] = {}

    def predict(
        self,
        prefill: Worker,
        decode: Worker,
        num_tokens: int,
        now: float,
        *,
        num_cached: int = 0,
        fetch_s: float = 0.0,
        load_s: float = 0.0,
    ) -> Prediction | None:
        """Predict a request on a pair; None = the prefill worker reports no step times yet.

        num_cached: of the prompt's tokens, in the worker's cache as far as the gateway knows, or
        fetched there first. fetch_s, load_s: until those that are fetched or loaded have come.
        """
        status = prefill.status
        if not status.prompt_steps.is_known:
            return None
        queue_s, own_s = prefill.wait_s(now)
        is_colocated = prefill is decode
        transfer_s = None
        if not is_colocated:
            num_bytes = num_tokens * prefill.layout.token_bytes
            transfer_s = self.transfers.between(prefill.incarnation, decode.incarnation, num_bytes)
        length = self.expected_output(num_tokens)
        return Prediction(
            queue_s=queue_s,
            own_s=own_s,
            prefill_s=status.prompt_s(num_tokens, num_cached),
            handover_s=self.handover_s(is_colocated=is_colocated),
            transfer_s=transfer_s,
            # Both go on beside the wait (``PromptTerms``): what is longer than that is waited for.
            fetch_s=max(0.0, fetch_s - queue_s - own_s),
            load_s=max(0.0, load_s - queue_s - own_s),
            num_output_tokens=length,
        )

    def expected_output(self, num_tokens: int) -> int | None:
        """Return how many tokens half of the answers to such prompts have at most; None = not
        known."""
        length = self.lengths.quantile(num_tokens, 0.5)
        return None if length is None else int(length)

    def handed_over(self, seconds: float, *, is_colocated: bool) -> None:
        """Token 1 left the gateway so long after prefill had it."""
        self._handovers[is_colocated].add(seconds)

    def handover_s(self, *, is_colocated: bool) -> float:
        """Return what half of the last hand-overs took at most; 0 = there was none."""
        return self._handovers[is_colocated].quantile(0.5)

    def answered(
        self, worker: Incarnation, *, predicted_s: float, actual_s: float, now: float
    ) -> bool | None:
        """Token 1 of a prompt, all of which was computed, came after ``actual_s``. Returns whether
        its worker is to be believed from now on; None = as before."""
        record = self._records.setdefault(worker, _Record())
        record.errors.append((now, abs(predicted_s - actual_s) / max(actual_s, 1e-6)))
        if not self._error_p50(record, now) > WRONG:
            record.wrong_since = None
        elif record.wrong_since is None:
            record.wrong_since = now
        was_believed = record.is_believed
        record.is_believed = record.wrong_since is None or now - record.wrong_since < WRONG_S
        return None if record.is_believed is was_believed else record.is_believed

    def error_p50(self, worker: Incarnation, now: float) -> float | None:
        """Return by what share half of the last minute's predictions were off at least; None = too
        few to say."""
        record = self._records.get(worker)
        return None if record is None else self._error_p50(record, now) or None

    def left(self, worker: Incarnation) -> None:
        """A worker has left for good."""
        self._records.pop(worker, None)

    @staticmethod
    def _error_p50(record: _Record, now: float) -> float:
        """0 = too few."""
        while record.errors and record.errors[0][0] < now - WRONG_S:
            record.errors.popleft()
        errors = sorted(error for _, error in record.errors)
        return errors[(len(errors) - 1) // 2] if len(errors) >= LEAST_ANSWERS else 0.0
