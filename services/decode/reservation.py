"""The life of a request on a decode worker: reserved -> granted -> receiving -> running -> ended.
No wire format here. On a colocated worker also: waiting -> its prompt's chunks -> running -> ended.

Three parties meet: the gateway (through ``AnswerLine``), the prefill worker (through the
receiver's ``LeaseBook``) and the scheduler. Who may have blocks, and until when, is decided by
``core/leases.py``; this shell performs its effects and keeps the clock that expires leases: a timer
of its own, so that nothing depends on new requests coming in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import structlog

from services.decode.core.lease import (
    AbortReceive,
    Effect,
    Grant,
    Lease,
    LeaseKey,
    LeaseState,
    Refuse,
    RefuseOpen,
)
from services.decode.core.leases import Leases
from services.decode.receiver import KvReceiver, LeaseTerms, NoTermsYet, ReceiveStats
from services.decode.request import AnswerLine, DecodeRequest, OwnPrompt, ReserveRequest
from services.decode.stepper import Stepper
from shared.errors import (
    DeadlinePassed,
    LeaseLost,
    MeshError,
    RemoteProtocolError,
    ShuttingDown,
)
from shared.failpoints import failpoint
from shared.ids import Incarnation, StreamId
from shared.model_spec import ModelSpec
from shared.request import FinishReason
from shared.schedule.admission import Duty, require_admissible
from shared.schedule.plan import Failure, NewToken, PromptTimes
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import CANCELLED, NO_TRACER, Phases, Tracer
from shared.telemetry.worker import DecodeMetrics
from shared.transfer.messages import TransferKey

_log = structlog.get_logger(__name__)


class Reservations:
    """All requests of this worker; the ``LeaseBook`` of its receiver and the ``TokenSink`` of its
    stepper.

    Call ``connect`` before any request comes. on_change: the load has changed.
    """

    def __init__(
        self,
        *,
        leases: Leases,
        spec: ModelSpec,
        metrics: DecodeMetrics,
        max_requests: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._leases = leases
        self._spec = spec
        self._metrics = metrics
        self._max_requests = max_requests
        self._on_change = on_change
        self._requests: dict[LeaseKey, DecodeRequest] = {}
        self._by_sequence: dict[TokenSequence, DecodeRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    def connect(self, receiver: KvReceiver, stepper: Stepper, tracer: Tracer = NO_TRACER) -> None:
        """Close the circle: both need this object, and this object needs both."""
        self._receiver = receiver
        self._stepper = stepper
        self._tracer = tracer

    @property
    def num_requests(self) -> int:
        """Requests that hold something."""
        return len(self._requests)

    # --- the gateway's side ----------------------------------------------------------------------

    def reserve(
        self, request: ReserveRequest, line: AnswerLine, stream_id: StreamId
    ) -> DecodeRequest | None:
        """Take a request; its first word (granted or failed) may come before this returns.

        Returns None if it has ended already. Raises MeshError: refused at once, ``line`` has heard
        nothing."""
        now = _now()
        try:
            self._require_admissible(request, now)
        except MeshError as error:
            if request.key not in self._requests:
                self._receiver.abort(TransferKey(*request.key), error)  # prefill opens all the same
            raise
        lease, effects = self._leases.reserve(
            request.key, request.item, request.prefill, now=now, wait_s=request.wait_s
        )
        phases = Phases(self._tracer.within(request.trace_context), "decode.reserve", now)
        record = DecodeRequest(line, stream_id, request.key, phases, lease=lease)
        self._take(record, request)
        self._perform(effects)
        if lease.state is LeaseState.WAITING:
            self._arm(lease.give_up_at)
            self._receiver.lease_changed(TransferKey(*lease.key))
        return record if self._requests.get(request.key) is record else None

    def compute(
        self, request: ReserveRequest, line: AnswerLine, stream_id: StreamId
    ) -> DecodeRequest:
        """Take a request as a whole: its prompt is computed here, in the steps of all others, and
        nothing is transferred. It waits for its turn as on a prefill worker: until its deadline.

        Raises MeshError: refused at once, ``line`` has heard nothing; NoCapacity: larger than the
        pool.
        """
        now = _now()
        self._require_admissible(request, now)
        sequence = TokenSequence(request.item)
        self._stepper.add_prompt(sequence)
        phases = Phases(self._tracer.within(request.trace_context), "prefill.queue", now)
        record = DecodeRequest(line, stream_id, request.key, phases, prompt=OwnPrompt(now))
        record.sequence = sequence
        self._by_sequence[sequence] = record
        self._take(record, request)
        self._on_change()
        return record

    def _require_admissible(self, request: ReserveRequest, now: float) -> None:
        duty = Duty("decode", len(self._requests), self._max_requests, self.is_draining)
        require_admissible(request.item, self._spec, duty, deadline_at=request.deadline_at, now=now)
        if request.key in self._requests:  # it may run already, and then has no lease any more
            raise RemoteProtocolError("this attempt has a reservation already", code="reserved")

    def _take(self, record: DecodeRequest, request: ReserveRequest) -> None:
        self._requests[request.key] = record
        self._idle.clear()
        if request.deadline_at is not None:
            record.deadline = asyncio.get_running_loop().call_at(
                request.deadline_at, self._deadline_passed, record
            )

    def cancel(self, request: DecodeRequest) -> None:
        """The gateway wants no more. Allowed at any time, also twice; it hears nothing but
        ``ended``.
        """
        request.is_told = True
        request.error = request.error or CANCELLED
        self._stop(request, LeaseLost("the gateway cancelled the request", code="cancelled"))

    def _deadline_passed(self, request: DecodeRequest) -> None:
        self._fail(request, DeadlinePassed("the deadline passed during decode"))

    def _fail(self, request: DecodeRequest, error: MeshError) -> None:
        self._tell_failed(request, error)
        self._stop(request, error)

    def _tell_failed(self, request: DecodeRequest, error: MeshError) -> None:
        if not request.is_told:
            request.is_told = True
            request.error = error.type
            _log.info("decode failed", type=error.type, error=error.message)
            request.line.failed(request.stream_id, error)

    def _stop(self, request: DecodeRequest, error: MeshError) -> None:
        if self._requests.get(request.key) is not request:
            return
        if request.sequence is not None:
            self._stepper.abort(request.sequence)
            self._end(request)
            self._grant_waiting()
            return
        lease = _lease_of(request)
        self._perform(self._leases.cancel(lease, error, now=_now()))
        if lease.state is LeaseState.RELEASED:
            self._end(request)

    def _end(self, request: DecodeRequest) -> None:
        """Forget a request that holds nothing, or whose blocks the scheduler gives back."""
        if self._requests.get(request.key) is not request:
            return
        del self._requests[request.key]
        if request.sequence is not None:
            del self._by_sequence[request.sequence]
            finish = request.sequence.finish_reason
            cut = "cancelled" if request.error == CANCELLED else "failed"
            outcome = cut if finish is FinishReason.NONE else finish.name.lower()
            tokens = {"pdmesh.output_tokens": request.sequence.num_output_tokens}
            request.phases.end(tokens, error=request.error)
        else:
            outcome = "not_joined"
            request.phases.end(error=request.error)
        self._metrics.requests.labels(outcome).inc()
        if request.deadline is not None:
            request.deadline.cancel()
        request.line.ended(request.stream_id)
        note(Moment.DECODE_CLOSED, request.key.request_id, reason=outcome)
        if not self._requests:
            self._idle.set()
        self._stepper.wake()  # what it held may be what others lack
        self._on_change()

    # --- leases ----------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Grant(lease):
                    failpoint("decode.before_grant")
                    request = self._requests[LeaseKey(*lease.key)]
                    request.phases.turn(
                        "decode.receive", _now(), {"pdmesh.cached_tokens": lease.skip_tokens}
                    )
                    self._metrics.queue_seconds.observe(lease.wait_s)
                    self._metrics.prompt_tokens.inc(lease.num_tokens)
                    self._metrics.cached_tokens.inc(lease.skip_tokens)
                    note(
                        Moment.RESERVED,
                        lease.key.request_id,
                        num_blocks=len(lease.block_table),
                        cached_tokens=lease.skip_tokens,
                        wait_s=lease.wait_s,
                    )
                    request.line.granted(
                        request.stream_id, cached_tokens=lease.skip_tokens, wait_s=lease.wait_s
                    )
                    self._arm(lease.expires_at)
                    self._receiver.lease_changed(TransferKey(*lease.key))
                case Refuse(lease, error):
                    request = self._requests[LeaseKey(*lease.key)]
                    self._tell_failed(request, error)
                    if lease.state is LeaseState.RELEASED:
                        self._end(request)
                case RefuseOpen(lease, error) | AbortReceive(lease, error):
                    self._receiver.abort(TransferKey(*lease.key), error)
        self._on_change()

    def _grant_waiting(self) -> None:
        self._perform(self._leases.grant_waiting(now=_now()))

    def _arm(self, at: float | None) -> None:
        """See to it that ``tick`` runs at this time or before."""
        if at is None or at == float("inf"):
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._leases.tick(now=_now()))
        self._arm(self._leases.next_event_at)

    # --- LeaseBook: the receiver's side ----------------------------------------------------------

    def attach(self, key: TransferKey, prefill: Incarnation) -> LeaseTerms | NoTermsYet:
        """See ``LeaseBook``."""
        request = self._requests.get(LeaseKey(*key))
        if request is None:
            return NoTermsYet.NOT_RESERVED
        if request.lease is None:
            raise LeaseLost("this attempt is computed here as a whole", code="colocated")
        lease = _lease_of(request)
        if not self._leases.open(lease, prefill):
            return NoTermsYet.NO_ROOM
        return LeaseTerms(
            num_tokens=lease.num_tokens,
            skip_tokens=lease.skip_tokens,
            block_table=lease.block_table,
        )

    def prefill_lost(self, prefill: Incarnation, error: MeshError) -> None:
        """See ``LeaseBook``."""
        self._perform(self._leases.lose_prefill(prefill, error, now=_now()))

    def placed(self, key: TransferKey, first_token: int, stats: ReceiveStats) -> None:
        """See ``LeaseBook``."""
        request = self._requests[LeaseKey(*key)]
        lease = _lease_of(request)
        if lease.state is not LeaseState.OPEN:
            # Cancelled in the same instant: nothing writes the blocks any more, and nobody wants
            # them.
            self.release(key)
            return
        if first_token >= self._spec.vocab_size:
            # In a step it would fail every sequence of the batch.
            text = f"prefill committed token {first_token}; the vocabulary has"
            self._tell_failed(request, RemoteProtocolError(f"{text} {self._spec.vocab_size}"))
            self.release(key)
            return
        failpoint("decode.before_join")
        request.sequence = self._leases.join(lease, first_token)
        self._by_sequence[request.sequence] = request
        self._stepper.add(request.sequence)
        # What follows must not hold the step up: the stepper has its turn of the loop before it.
        asyncio.get_running_loop().call_soon(self._tell_joined, request, lease, stats)

    def _tell_joined(self, request: DecodeRequest, lease: Lease, stats: ReceiveStats) -> None:
        if self._requests.get(request.key) is not request:
            return  # cancelled in the same instant: its last word is said
        lane = self._receiver.lane_from(lease.prefill)
        if stats.num_bytes:
            self._metrics.transfer_bytes.labels(lane).inc(stats.num_bytes)
            self._metrics.transfer_seconds.labels(lane).observe(stats.receive_s)
        request.phases.turn(
            "decode.steps",
            _now(),
            {"pdmesh.bytes": stats.num_bytes, "pdmesh.receive_s": stats.receive_s},
        )
        request.line.joined(request.stream_id, stats, lane)
        note(Moment.JOINED, request.key.request_id, num_frames=stats.num_frames)
        self._on_change()

    def failed(self, key: TransferKey, error: MeshError) -> None:
        """See ``LeaseBook``."""
        request = self._requests[LeaseKey(*key)]
        self._tell_failed(request, error)
        # The receiver aborts by itself: the effect that would ask it to is dropped.
        self._leases.cancel(_lease_of(request), error, now=_now())

    def quarantined(self, key: TransferKey) -> None:
        """See ``LeaseBook``."""
        self._leases.begin_quarantine(_lease_of(self._requests[LeaseKey(*key)]))

    def release(self, key: TransferKey) -> None:
        """See ``LeaseBook``."""
        request = self._requests[LeaseKey(*key)]
        lease = _lease_of(request)
        if lease.state is LeaseState.QUARANTINED:
            effects = self._leases.end_quarantine(lease, now=_now())
        else:
            effects = self._leases.release(lease, now=_now())
        self._end(request)
        self._perform(effects)

    # --- TokenSink: the stepper's side -----------------------------------------------------------

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        """See ``TokenSink``."""
        now = _now()
        for sequence in sequences:
            request = self._by_sequence[sequence]
            prompt = request.prompt
            if prompt is None or prompt.started_at is not None:
                continue  # preempted before, and back
            prompt.started_at = now
            request.phases.turn("prefill.compute", now)
            self._metrics.queue_seconds.observe(now - prompt.arrived_at)
            self._metrics.prompt_tokens.inc(sequence.num_tokens)
            self._metrics.cached_tokens.inc(sequence.num_cached_tokens)

    def step_done(self, tokens: Sequence[NewToken]) -> None:
        """See ``TokenSink``."""
        by_line: dict[int, tuple[AnswerLine, list[tuple[StreamId, NewToken]]]] = {}
        finished: list[DecodeRequest] = []
        for token in tokens:
            request = self._by_sequence[token.sequence]
            if request.prompt is not None:
                self._tell_first(request, request.prompt, token)
            else:
                _, rows = by_line.setdefault(id(request.line), (request.line, []))
                rows.append((request.stream_id, token))
            note(Moment.STEPPED, request.key.request_id, index=token.index)
            if token.finish_reason is not FinishReason.NONE:
                finished.append(request)
        for line, rows in by_line.values():
            line.step_tokens(rows)
        for request in finished:
            request.is_told = True
            self._end(request)
        self._grant_waiting()

    def _tell_first(self, request: DecodeRequest, prompt: OwnPrompt, token: NewToken) -> None:
        now = _now()
        started_at = prompt.arrived_at if prompt.started_at is None else prompt.started_at
        times = PromptTimes(
            queue_s=started_at - prompt.arrived_at,
            compute_s=now - started_at,
            cached_tokens=token.sequence.num_cached_tokens,
        )
        tokens, cached = token.sequence.num_prompt_tokens, times.cached_tokens
        request.phases.turn(
            "decode.steps", now, {"pdmesh.prompt_tokens": tokens, "pdmesh.cached_tokens": cached}
        )
        request.prompt = None
        request.line.first_token(request.stream_id, token, times)
        self._on_change()

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        """See ``TokenSink``."""
        for failure in failures:
            request = self._by_sequence[failure.sequence]
            self._tell_failed(request, failure.error)
            self._end(request)
        self._grant_waiting()

    def engine_failed(self, error: MeshError) -> None:
        """See ``TokenSink``."""
        self.fail_all(error)

    # --- ending ----------------------------------------------------------------------------------

    def fail_all(self, error: MeshError) -> None:
        """Fail every request that is not decided."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait until every answer has ended and given its blocks back; False:
        the limit came first, the rest failed.
        """
        self.is_draining = True
        self._on_change()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
                await self._stepper.quiet()
        except TimeoutError:
            self.fail_all(ShuttingDown("this decode worker stopped before the answer was done"))
            return False
        return True

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()


def _lease_of(request: DecodeRequest) -> Lease:
    """Return the lease of a request that prefill computes; no other has dealings with leases."""
    assert request.lease is not None
    return request.lease


def _now() -> float:
    return asyncio.get_running_loop().time()
