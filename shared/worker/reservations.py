"""What an answer has before its KV is here: a promise of room, then a transfer into it.

Who may have blocks, and until when, is decided by ``core/leases.py``; this shell performs its
effects and keeps the clock that expires leases: a timer of its own, so that nothing depends on new
requests coming in. The ``LeaseBook`` of the worker's receiver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from shared.errors import LeaseLost, MeshError, RemoteProtocolError
from shared.failpoints import failpoint
from shared.ids import Incarnation
from shared.runtime.loops import loop_time
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.worker import DecodeMetrics
from shared.transfer.effects import MAX_RESERVE_WAIT_S, HandOver
from shared.transfer.messages import TransferKey
from shared.worker.core.lease import (
    AbortReceive,
    GrantLease,
    Lease,
    LeaseState,
    MakeRoom,
    Refuse,
    RefuseOpen,
)
from shared.worker.core.lease import Effect as LeaseEffect
from shared.worker.core.leases import Leases
from shared.worker.core.life import LifeEvent, LifeState, Task
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver, LeaseTerms, NoTermsYet
from shared.worker.request import Request


class Reservations:
    """All leases of this worker, as things that run. answers: all there are, by key; ``Requests``
    keeps them, performs what their lives decide (``handle``), and takes over who has all its KV
    (``joined``).

    receiver: whose transfers fill the leases; pusher: whose KV may take their room. Both are set
    before any request comes.
    """

    def __init__(
        self,
        leases: Leases,
        answers: Mapping[TransferKey, Request],
        *,
        vocab_size: int,
        metrics: DecodeMetrics,
        handle: Callable[[Request, LifeEvent, MeshError | None], None],
        joined: Callable[[Request, TokenSequence], None],
        on_change: Callable[[], None],
    ) -> None:
        self._leases = leases
        self._answers = answers
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._handle = handle
        self._joined = joined
        self._on_change = on_change
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handles do not tell, if it is within half a millisecond
        self.receiver: KvReceiver | None = None
        self.pusher: Pusher | None = None

    def reserve(self, request: Request, now: float) -> None:
        """Ask for room; the request's first word (granted or failed) may come before this
        returns."""
        order = request.order
        assert order.peer is not None
        lease, effects = self._leases.reserve(
            order.key,
            order.item,
            order.peer,
            now=now,
            wait_s=min(order.wait_s, MAX_RESERVE_WAIT_S),
        )
        request.lease = lease
        self._perform_leases(effects)
        if lease.state is LeaseState.WAITING:
            self._arm(self._leases.next_tick_at)
            self._lease_changed(lease)

    def cancel(self, request: Request, error: MeshError) -> None:
        """Give a reservation up; its request settles when nothing can write its blocks."""
        lease = _lease_of(request)
        self._perform_leases(self._leases.cancel(lease, error, now=loop_time()))
        if lease.state is LeaseState.RELEASED:
            self._handle(request, LifeEvent.SETTLED, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _perform_leases(self, effects: Iterable[LeaseEffect]) -> None:
        for effect in effects:
            match effect:
                case GrantLease(lease):
                    failpoint("decode.before_grant")
                    self._granted(self._answers[lease.key], lease)
                case Refuse(lease, error):
                    self._handle(self._answers[lease.key], LifeEvent.FAILED, error)
                case RefuseOpen(lease, error) | AbortReceive(lease, error):
                    if self.receiver is not None:
                        self.receiver.abort(lease.key, error)
                case MakeRoom(num_tokens, error):
                    if self.pusher is not None:
                        self.pusher.give_way(num_tokens, error)
        self._on_change()

    def _granted(self, request: Request, lease: Lease) -> None:
        if request.task is not Task.PREFIX:
            self._count_granted(request, lease)
        request.gateway.granted(
            request.order.stream_id, cached_tokens=lease.skip_tokens, wait_s=lease.wait_s
        )
        self._arm(lease.expires_at)
        self._lease_changed(lease)

    def _count_granted(self, request: Request, lease: Lease) -> None:
        request.phases.turn(
            "decode.receive", loop_time(), {"pdmesh.cached_tokens": lease.skip_tokens}
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

    def _lease_changed(self, lease: Lease) -> None:
        if self.receiver is not None:
            self.receiver.lease_changed(lease.key)

    def grant_waiting(self) -> None:
        """Grant what fits now. Call whenever blocks may have come free."""
        self._perform_leases(self._leases.grant_waiting(now=loop_time()))

    def steps(self) -> None:
        self._leases.steps()

    def rests(self) -> None:
        """None does, as nobody is here or nobody has room."""
        self._leases.rests(now=loop_time())
        self._arm(self._leases.next_tick_at)

    def _arm(self, at: float | None) -> None:
        """See to it that ``_tick`` runs at this time or before."""
        if at is None or at == float("inf"):
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform_leases(self._leases.tick(now=loop_time()))
        self._arm(self._leases.next_tick_at)

    # --- LeaseBook: the receiver's side ----------------------------------------------------------

    def attach(self, key: TransferKey, source: Incarnation) -> LeaseTerms | NoTermsYet:
        request = self._answers.get(key)
        if request is None:
            return NoTermsYet.NOT_RESERVED
        if request.lease is None:
            raise LeaseLost("this attempt is computed here as a whole", code="colocated")
        lease = request.lease
        if not self._leases.open(lease, source):
            return NoTermsYet.NO_ROOM
        return LeaseTerms(
            num_tokens=lease.num_tokens,
            skip_tokens=lease.skip_tokens,
            block_table=lease.block_table,
            is_prefix=request.task is Task.PREFIX,
        )

    def source_lost(self, source: Incarnation, error: MeshError) -> None:
        self._perform_leases(self._leases.lose_source(source, error, now=loop_time()))

    def placed(self, receive: HandOver) -> None:
        request, first_token = self._answers[receive.key], receive.first_token
        lease = _lease_of(request)
        if lease.state is not LeaseState.OPEN:
            # Cancelled in the same instant: nothing writes the blocks any more, and nobody wants
            # them.
            self.release(receive.key)
            return
        if request.task is Task.PREFIX:
            assert self.receiver is not None
            effects = self._leases.keep(lease, receive.num_tokens, now=loop_time())
            lane = self.receiver.lane_from(lease.source)
            request.gateway.joined(request.order.stream_id, receive, lane)
            self._handle(request, LifeEvent.KEPT, None)
            self._perform_leases(effects)
            return
        if first_token >= self._vocab_size:
            # In a step it would fail every sequence of the batch.
            text = f"prefill committed token {first_token}; the vocabulary has"
            error = RemoteProtocolError(f"{text} {self._vocab_size}")
            # First: the failure then finds nothing to abort, and the request settles with it.
            effects = self._leases.release(lease, now=loop_time())
            self._handle(request, LifeEvent.FAILED, error)
            self._perform_leases(effects)
            return
        failpoint("decode.before_join")
        self._joined(request, self._leases.join(lease, first_token))
        # What follows must not hold the step up: the stepper has its turn of the loop before it.
        asyncio.get_running_loop().call_soon(self._tell_joined, request, lease, receive)

    def _tell_joined(self, request: Request, lease: Lease, receive: HandOver) -> None:
        if request.life.state is LifeState.CLOSED:
            return  # cancelled in the same instant: its last word is said
        assert self.receiver is not None
        lane = self.receiver.lane_from(lease.source)
        if receive.num_bytes:
            self._metrics.transfer_bytes.labels(lane).inc(receive.num_bytes)
            self._metrics.transfer_seconds.labels(lane).observe(receive.receive_s)
        request.phases.turn(
            "decode.steps",
            loop_time(),
            {"pdmesh.bytes": receive.num_bytes, "pdmesh.receive_s": receive.receive_s},
        )
        request.gateway.joined(request.order.stream_id, receive, lane)
        note(Moment.JOINED, request.order.key.request_id, num_frames=receive.num_frames)
        self._on_change()

    def failed(self, key: TransferKey, error: MeshError) -> None:
        request = self._answers[key]
        # The receiver aborts by itself: the effect that would ask it to is dropped.
        self._leases.cancel(_lease_of(request), error, now=loop_time())
        self._handle(request, LifeEvent.FAILED, error)

    def quarantined(self, key: TransferKey) -> None:
        self._leases.begin_quarantine(_lease_of(self._answers[key]))

    def release(self, key: TransferKey) -> None:
        request = self._answers[key]
        effects = self._leases.settled(_lease_of(request), now=loop_time())
        self._handle(request, LifeEvent.SETTLED, None)
        self._perform_leases(effects)


def _lease_of(request: Request) -> Lease:
    """Return the lease of an answer; no other has dealings with leases."""
    assert request.lease is not None
    return request.lease
