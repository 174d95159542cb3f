"""A worker's end of the sessions with gateways: serves ``Worker.Session``, one stream per gateway
that carries its orders in and its tokens out.

What a request is and when it ends is ``requests.py``'s; here is only its wire form. One
``StepTokens`` per step and gateway holds the tokens of all its sequences as packed columns, so the
cost of streaming does not grow with the batch. Losing a session cancels its requests. Heartbeats
are ``heartbeat_stream.py``'s. A gateway that does not read is dropped: a worker cannot slow down
one gateway's tokens without slowing all others, so beyond ``MAX_OUTBOX_BYTES`` of unsent events its
session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import structlog

from shared import wire
from shared.errors import MeshError, RemoteProtocolError, TooLarge, WorkerLost, without_frames
from shared.home import Role
from shared.ids import NO_ORDER, Incarnation, StreamId
from shared.liveness import LivenessRule
from shared.messages import codec
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.request import WorkItem
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import WORKER_SESSION
from shared.rpc.service import ServerStream, Servicer, bind
from shared.schedule.plan import NewToken, PromptTimes
from shared.transfer.effects import HandOver
from shared.worker.core.life import Task
from shared.worker.pusher import PushStats
from shared.worker.request import Request
from shared.worker.requests import Requests

_log = structlog.get_logger(__name__)

MAX_OUTBOX_BYTES = 8 * MAX_MESSAGE_BYTES
"""Unsent events of one session: a few of the largest must not look like a gateway that does not
read."""

EVENT_BYTES = 64
"""What a small event counts for in the outbox, before its columns."""

HELLO_WITHIN_S = 3.0

SessionStream: TypeAlias = ServerStream[wire.WorkerCommand, wire.WorkerEvent]

OF_A_GATEWAY = LivenessRule(interval_s=1.0, suspect_after_s=2.0, dead_after_s=3.0)
"""Nobody waits for a worker to give its gateway up: that only cancels what clients still read."""

_ROW_BYTES = 13
"""Of a row of ``StepTokens``: stream, index and token of 4 bytes each, and a finish reason."""
_STEP_BYTES = MAX_MESSAGE_BYTES // 2
"""Where a step's message is cut: so far below the limit that what is not counted never matters."""
_FIRST_BYTES = 256
"""Most that a PrefillToken takes beside its columns."""


class GatewaySession:
    """One gateway's session, and what it has asked for: the ``AskingGateway`` of its requests.
    ``send`` never waits; after the end it does nothing."""

    def __init__(self, gateway: Incarnation, stream: SessionStream, rule: LivenessRule) -> None:
        self.gateway = gateway
        self.seen = NO_ORDER
        """The last order that has been heard of."""
        self.requests: dict[StreamId, Request] = {}
        self._max_outbox_bytes = MAX_OUTBOX_BYTES
        self._sizes: deque[int] = deque()
        self._outbox_bytes = 0
        self.drained = asyncio.Event()
        """Set while every queued event was given to the connection, or the session has ended."""
        self.drained.set()
        self._stream: HeartbeatStream[wire.WorkerEvent, wire.WorkerCommand] = HeartbeatStream(
            stream,
            heartbeat=lambda asks: wire.WorkerEvent(heartbeat=wire.Heartbeat(asks=asks)),
            peer="gateway",
            rule=rule,
            on_sent=self._sent,
        )

    def send(self, event: wire.WorkerEvent, num_bytes: int = EVENT_BYTES) -> None:
        """Send an event, or queue it, in order. num_bytes: its approximate size, columns
        included."""
        if self._stream.is_over:
            return
        # Before it is sent: one that leaves at once is taken off the books within the call.
        self._sizes.append(num_bytes)
        self._outbox_bytes += num_bytes
        self.drained.clear()
        self._stream.send(event)
        if self._outbox_bytes > self._max_outbox_bytes:
            self.close(WorkerLost(f"the gateway left {self._outbox_bytes} bytes of events unread"))

    def close(self, error: MeshError) -> None:
        """End the session with this error. Returns at once; idempotent."""
        self._stream.close(error)
        self.drained.set()

    async def run(self, on_command: Callable[[wire.WorkerCommand], None]) -> MeshError:
        """Serve until the session is over; returns why."""
        try:
            return await self._stream.run(on_command)
        finally:
            self.drained.set()

    def _sent(self) -> None:
        self._outbox_bytes -= self._sizes.popleft()
        if not self._sizes:
            self.drained.set()

    # --- what requests say ------------------------------------------------------------------------

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        granted = wire.Granted(stream_id=stream_id, cached_tokens=cached_tokens, wait_s=wait_s)
        self.send(wire.WorkerEvent(granted=granted))

    def joined(self, stream_id: StreamId, receive: HandOver, lane: str) -> None:
        joined = wire.Joined(
            stream_id=stream_id,
            bytes_received=receive.num_bytes,
            num_frames=receive.num_frames,
            receive_s=receive.receive_s,
            lane=lane,
        )
        self.send(wire.WorkerEvent(joined=joined))

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        message = codec.prefill_token_to_wire(stream_id, token, times)
        # Twice: alternatives are ids and logprobs, rows logprobs and counts, all of 4 bytes.
        num_bytes = EVENT_BYTES + 2 * len(message.top_ids)
        if (rows := message.prompt_logprobs) is not None:
            num_bytes += 2 * (len(rows.logprobs) + len(rows.top_ids))
        self.send(wire.WorkerEvent(token=message), num_bytes)

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        for part in _messages(tokens):
            step = codec.step_tokens_to_wire(part)
            num_bytes = EVENT_BYTES + _ROW_BYTES * len(part)
            num_bytes += 2 * (len(step.logprobs) + len(step.top_ids))
            self.send(wire.WorkerEvent(tokens=step), num_bytes)

    def pushed(self, stream_id: StreamId, stats: PushStats) -> None:
        done = wire.PrefillDone(
            stream_id=stream_id,
            bytes_sent=stats.num_bytes,
            transfer_s=stats.transfer_s,
            exposed_s=stats.exposed_s,
            lane=stats.lane,
            mode=stats.mode,
        )
        self.send(wire.WorkerEvent(done=done))

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        failed = wire.OrderFailed(stream_id=stream_id, error=codec.error_to_wire(error))
        self.send(wire.WorkerEvent(failed=failed), EVENT_BYTES + len(error.message))

    def ended(self, stream_id: StreamId) -> None:
        self.requests.pop(stream_id, None)


class Door:
    """The sessions of all gateways. role: of the worker's hello. on_silent: a gateway stopped
    talking; its incarnation."""

    def __init__(
        self,
        requests: Requests,
        role: Role,
        incarnation: Incarnation,
        *,
        on_silent: Callable[[Incarnation], None],
        rule: LivenessRule = OF_A_GATEWAY,
    ) -> None:
        self.incarnation = incarnation
        self.sessions: set[GatewaySession] = set()
        self.servicer = Servicer(bind(WORKER_SESSION, self._serve))
        self._requests = requests
        self._hello = codec.own_hello(codec.role_to_wire(role), incarnation)
        self._on_silent = on_silent
        self._rule = rule

    def seen(self, gateway: Incarnation) -> StreamId:
        """Return the last order of a gateway that has been heard of; 0 = none."""
        found = (session.seen for session in self.sessions if session.gateway == gateway)
        return max(found, default=NO_ORDER)

    async def flush(self, limit_s: float) -> None:
        """Wait until every event was given to its connection, or the limit came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for session in list(self.sessions):
                    await session.drained.wait()

    async def _serve(self, stream: SessionStream) -> None:
        """Serve one session until the gateway ends it, falls silent, breaks a rule, or does not
        read.

        Raises MeshError: what the gateway's call ends with.
        """
        session = GatewaySession(await _shake_hands(stream), stream, self._rule)
        session.send(wire.WorkerEvent(hello=self._hello))
        self.sessions.add(session)
        error: MeshError = WorkerLost("the session was cancelled")
        try:
            error = await session.run(partial(self._on_command, session))
        finally:
            self.sessions.discard(session)
            self._closed(session, is_silent=error.code == "silent")
            _log.info("session closed", gateway=session.gateway, error=error.message)
        # Who is gone needs no word; who broke a rule is told which.
        if not isinstance(error, WorkerLost):
            raise error

    def _on_command(self, session: GatewaySession, command: wire.WorkerCommand) -> None:
        if command.hello is not None:
            raise RemoteProtocolError("hello comes once, and first")
        if (order := command.order) is not None:
            # A gateway adds to a report those of its own orders that it has not seen
            # (services/gateway/core/worker.py).
            session.seen = StreamId(order.stream_id)
            self._take(session, order)
        elif command.cancel is not None:
            # It may be over already.
            if request := session.requests.get(StreamId(command.cancel.stream_id)):
                self._requests.cancel(request)
        else:
            raise RemoteProtocolError("a command of no known kind")

    def _take(self, session: GatewaySession, order: wire.WorkOrder) -> None:
        """Raises RemoteProtocolError: end the session."""
        stream_id = StreamId(order.stream_id)
        if stream_id in session.requests:
            # Ends the session: under this id a failure would be the other request's.
            raise RemoteProtocolError("a stream_id is used once", param="stream_id")
        try:
            checked, task = codec.order_from_wire(order), self._task_of(order)
            # Token 1 of an answer, with its prompt's logprobs, is sent where the prompt is
            # computed.
            if task is not Task.ANSWER:
                _require_sendable(checked.item)
            request = self._requests.take(task, checked, session)
        except MeshError as error:
            # What refuses the prompt's open keeps it, maybe for long; its frames keep the order.
            session.failed(stream_id, without_frames(error))
            return
        if request is not None:
            session.requests[stream_id] = request

    def _task_of(self, order: wire.WorkOrder) -> Task:
        if order.role == wire.Role.PREFILL:
            return Task.PROMPT
        if order.role != wire.Role.DECODE:
            raise RemoteProtocolError("an order is for one of a worker's roles", param="role")
        if not order.peer_incarnation:
            raise RemoteProtocolError("somebody computes the prompt", param="peer_incarnation")
        return Task.WHOLE if order.peer_incarnation == self.incarnation else Task.ANSWER

    def _closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        # To the worker at the other end of a push this is an error: its own session may live on.
        error = WorkerLost("the gateway's session with the other worker ended")
        for request in list(session.requests.values()):
            self._requests.cancel(request, error)
        # A later session of the same gateway shows that it is there: this one's end was lost.
        if is_silent and all(it.gateway != session.gateway for it in self.sessions):
            self._on_silent(session.gateway)


async def _shake_hands(stream: SessionStream) -> Incarnation:
    try:
        async with asyncio.timeout(HELLO_WITHIN_S):
            command = await stream.receive()
    except TimeoutError:
        raise RemoteProtocolError(f"no hello within {HELLO_WITHIN_S:g} s") from None
    return codec.gateway_of(None if command is None else command.hello)


def _messages(
    rows: Sequence[tuple[StreamId, NewToken]],
) -> Iterator[Sequence[tuple[StreamId, NewToken]]]:
    """Cut a step whose logprobs would not fit one message; any other step is one message."""
    first, num_bytes = 0, 0
    for idx, (_, token) in enumerate(rows):
        row_bytes = _ROW_BYTES
        if token.logprobs is not None:
            row_bytes += codec.logprobs_bytes(1, len(token.logprobs.top))
        if num_bytes + row_bytes > _STEP_BYTES and idx > first:
            yield rows[first:idx]
            first, num_bytes = idx, 0
        num_bytes += row_bytes
    yield rows[first:]


def _require_sendable(item: WorkItem) -> None:
    """Refuse, before anything is computed, a prompt whose first token would not fit one message.

    Sending it would end the session, and every other request of the gateway with it.
    Raises TooLarge.
    """
    k = item.sampling.prompt_logprobs
    if k is None:
        return
    own = codec.logprobs_bytes(1, item.sampling.logprobs or 0)
    num_bytes = codec.logprobs_bytes(len(item.token_ids), k) + own + _FIRST_BYTES
    if num_bytes > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"logprobs of {len(item.token_ids)} prompt tokens with {k} alternatives each take "
            f"{num_bytes} bytes, over the limit of {MAX_MESSAGE_BYTES}: ask for fewer alternatives "
            "or send a shorter prompt",
            param="prompt_logprobs",
            code="prompt_logprobs_too_large",
        )
