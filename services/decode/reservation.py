"""The life of a request on a decode worker: reserved -> granted -> receiving -> running -> ended.
No wire format here.

Three parties meet: the gateway (through ``AnswerLine``), the prefill worker (through the
receiver's ``LeaseBook``) and the scheduler. Who may have blocks, and until when, is decided by
``core/leases.py``; this shell performs its effects and keeps the clock that expires leases: a timer
of its own, so that nothing depends on new requests coming in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
from shared.request import FinishReason, WorkItem
from shared.schedule.admission import Duty, require_admissible
from shared.schedule.plan import Failure, NewToken
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import CANCELLED, NO_TRACER, Phases, Tracer
from shared.telemetry.worker import DecodeMetrics
from shared.transfer.messages import TransferKey

_log = structlog.get_logger(__name__)


class AnswerLine(Protocol):
    """One gateway, as its requests speak to it; every call returns at once."""

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """Room is promised."""
        ...

    def joined(self, stream_id: StreamId, stats: ReceiveStats, lane: str) -> None:
        """All KV is placed: tokens follow from the next step on. lane: what carried it."""
        ...

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        """One step's tokens of this gateway; a finish reason is a request's last word."""
        ...

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        """The request has failed; its last word."""
        ...

    def ended(self, stream_id: StreamId) -> None:
        """The request holds nothing and will say nothing any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """One attempt to decode. prefill: who may push. wait_s: how long it may wait for blocks.
    deadline_at: loop time. trace_context: see ``tracing.Span.context``.
    """

    key: LeaseKey
    item: WorkItem
    prefill: Incarnation
    wait_s: float
    deadline_at: float | None
    trace_context: str = ""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request and what it holds: a lease, later a sequence. Identity is the object.

    is_told: the gateway has had, or wants, no further word. error: type of what ended it.
    """

    line: AnswerLine
    stream_id: StreamId
    key: LeaseKey
    lease: Lease
    phases: Phases
    error: str = ""
    sequence: TokenSequence | None = None
    deadline: asyncio.TimerHandle | None = None
    is_told: bool = False


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
        now = asyncio.get_running_loop().time()
        duty = Duty("decode", len(self._requests), self._max_requests, self.is_draining)
        require_admissible(request.item, self._spec, duty, deadline_at=request.deadline_at, now=now)
        if request.key in self._requests:  # it may run already, and then has no lease any more
            raise RemoteProtocolError("this attempt has a reservation already", code="reserved")
        lease, effects = self._leases.reserve(
            request.key, request.item, request.prefill, now=now, wait_s=request.wait_s
        )
        phases = Phases(self._tracer.within(request.trace_context), "decode.reserve", now)
        record = DecodeRequest(line, stream_id, request.key, lease, phases)
        self._requests[request.key] = record
        self._idle.clear()
        if request.deadline_at is not None:
            record.deadline = asyncio.get_running_loop().call_at(
                request.deadline_at, self._deadline_passed, record
            )
        self._perform(effects)
        if lease.state is LeaseState.WAITING:
            self._arm(lease.give_up_at)
            self._receiver.lease_changed(TransferKey(*lease.key))
        return record if self._requests.get(request.key) is record else None

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
        self._perform(self._leases.cancel(request.lease, error, now=_now()))
        if request.lease.state is LeaseState.RELEASED:
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
        lease = request.lease
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
        if request.lease.state is not LeaseState.OPEN:
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
        request.sequence = self._leases.join(request.lease, first_token)
        self._by_sequence[request.sequence] = request
        lane = self._receiver.lane_from(request.lease.prefill)
        if stats.num_bytes:
            self._metrics.transfer_bytes.labels(lane).inc(stats.num_bytes)
            self._metrics.transfer_seconds.labels(lane).observe(stats.receive_s)
        request.phases.turn(
            "decode.steps",
            _now(),
            {"pdmesh.bytes": stats.num_bytes, "pdmesh.receive_s": stats.receive_s},
        )
        request.line.joined(request.stream_id, stats, lane)
        note(Moment.JOINED, key.request_id, num_frames=stats.num_frames)
        self._stepper.add(request.sequence)
        self._on_change()

    def failed(self, key: TransferKey, error: MeshError) -> None:
        """See ``LeaseBook``."""
        request = self._requests[LeaseKey(*key)]
        self._tell_failed(request, error)
        # The receiver aborts by itself: the effect that would ask it to is dropped.
        self._leases.cancel(request.lease, error, now=_now())

    def quarantined(self, key: TransferKey) -> None:
        """See ``LeaseBook``."""
        self._leases.begin_quarantine(self._requests[LeaseKey(*key)].lease)

    def release(self, key: TransferKey) -> None:
        """See ``LeaseBook``."""
        request = self._requests[LeaseKey(*key)]
        lease = request.lease
        if lease.state is LeaseState.QUARANTINED:
            effects = self._leases.end_quarantine(lease, now=_now())
        else:
            effects = self._leases.release(lease, now=_now())
        self._end(request)
        self._perform(effects)
        self._stepper.wake()

    # --- TokenSink: the stepper's side -----------------------------------------------------------

    def step_done(self, tokens: Sequence[NewToken]) -> None:
        """See ``TokenSink``."""
        by_line: dict[int, tuple[AnswerLine, list[tuple[StreamId, NewToken]]]] = {}
        finished: list[DecodeRequest] = []
        for token in tokens:
            request = self._by_sequence[token.sequence]
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
        """Take nothing new and wait until every answer has ended; False: the limit came first, the
        rest failed.
        """
        self.is_draining = True
        self._on_change()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            self.fail_all(ShuttingDown("this decode worker stopped before the answer was done"))
            return False
        return True

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()
