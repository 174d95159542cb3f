"""A worker's end of one gateway's session: the handshake, a byte-bounded outbox, and one place to
end.

Prefill.Session and Decode.Session differ in their messages alone; what a command means is the
business of ``shared/worker/doors.py``. Heartbeats are ``heartbeat_stream.py``'s. A gateway that
does not read is dropped: a worker cannot slow down one gateway's tokens without slowing all others,
so beyond ``MAX_OUTBOX_BYTES`` of unsent events its session ends and its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from shared import wire
from shared.errors import MeshError, RemoteProtocolError, WorkerLost
from shared.home import Role
from shared.ids import Incarnation, StreamId
from shared.liveness import LivenessRule
from shared.messages import codec
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import Method
from shared.rpc.service import ServerStream, Servicer, bind

_log = structlog.get_logger(__name__)

MAX_OUTBOX_BYTES = 8 * MAX_MESSAGE_BYTES
"""Unsent events of one session: a few of the largest must not look like a gateway that does not
read."""

EVENT_BYTES = 64
"""What a small event counts for in the outbox, before its columns."""

HELLO_WITHIN_S = 3.0

OF_A_GATEWAY = LivenessRule(interval_s=1.0, suspect_after_s=2.0, dead_after_s=3.0)
"""Nobody waits for a worker to give its gateway up: that only cancels what clients still read."""


class GatewaySession:
    """One gateway's session. ``send`` never waits; after the end it does nothing."""

    def __init__(
        self,
        gateway: Incarnation,
        stream: ServerStream[Any, Any],
        *,
        heartbeat: Callable[[bool], Any],
        rule: LivenessRule,
    ) -> None:
        self.gateway = gateway
        self.seen = StreamId(0)
        """The last order that has been heard of."""
        self._max_outbox_bytes = MAX_OUTBOX_BYTES
        self._sizes: deque[int] = deque()
        self._outbox_bytes = 0
        self.drained = asyncio.Event()
        """Set while every queued event was given to the connection, or the session has ended."""
        self.drained.set()
        self._stream: HeartbeatStream[Any, Any] = HeartbeatStream(
            stream,
            heartbeat=heartbeat,
            peer="gateway",
            rule=rule,
            on_sent=self._sent,
        )

    def send(self, event: Any, num_bytes: int = EVENT_BYTES) -> None:
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

    async def run(self, door: GatewaySessions) -> MeshError:
        """Serve until the session is over; returns why."""

        def on_message(command: Any) -> None:
            if command.hello is not None:
                raise RemoteProtocolError("hello comes once, and first")
            order = getattr(command, door.orders)
            if order is not None:
                # A gateway adds to a report those of its own orders that it has not seen
                # (services/gateway/core/worker.py).
                self.seen = StreamId(order.stream_id)
                door.session_order(self, order)
            elif command.cancel is not None:
                door.session_cancel(self, StreamId(command.cancel.stream_id))
            else:
                raise RemoteProtocolError("a command of no known kind")

        try:
            return await self._stream.run(on_message)
        finally:
            self.drained.set()

    def _sent(self) -> None:
        self._outbox_bytes -= self._sizes.popleft()
        if not self._sizes:
            self.drained.set()

    def __repr__(self) -> str:
        return f"<GatewaySession gateway={self.gateway:016x} {self._outbox_bytes} B unsent>"


class GatewaySessions(ABC):
    """The sessions of all gateways at one of a worker's two doors: serves the method that carries
    them. Calls of ``session_...`` are on the loop and return at once."""

    role: Role
    method: Method[Any, Any]
    event: Callable[..., Any]
    """What it says: PrefillEvent or DecodeEvent."""
    orders: str
    """The field of a command that holds an order."""

    def __init__(self, incarnation: Incarnation, *, rule: LivenessRule = OF_A_GATEWAY) -> None:
        self.incarnation = incarnation
        self._rule = rule
        self._sessions: set[GatewaySession] = set()
        self.servicer = Servicer(bind(self.method, self._serve))

    @abstractmethod
    def session_opened(self, session: GatewaySession) -> None:
        """The handshake is done."""

    @abstractmethod
    def session_order(self, session: GatewaySession, order: Any) -> None:
        """The message of an order. Raises RemoteProtocolError: end the session."""

    @abstractmethod
    def session_cancel(self, session: GatewaySession, stream_id: StreamId) -> None:
        """An order is taken back; it may be over already."""

    @abstractmethod
    def session_closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        """The gateway is gone or was dropped: cancel everything it asked for. Called once after
        ``opened``.

        is_silent: it just stopped talking, so its other streams may not have noticed.
        """

    def __len__(self) -> int:
        return len(self._sessions)

    def seen(self, gateway: Incarnation) -> StreamId:
        """Return the last order of a gateway that has been heard of; 0 = none."""
        found = (session.seen for session in self._sessions if session.gateway == gateway)
        return max(found, default=StreamId(0))

    async def flush(self, limit_s: float) -> None:
        """Wait until every event was given to its connection, or the limit came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for session in list(self._sessions):
                    await session.drained.wait()

    async def _serve(self, stream: ServerStream[Any, Any]) -> None:
        """Serve one session until the gateway ends it, falls silent, breaks a rule, or does not
        read.

        Raises MeshError: what the gateway's call ends with.
        """
        gateway = await _shake_hands(stream)
        session = GatewaySession(
            gateway,
            stream,
            heartbeat=lambda asks: self.event(heartbeat=wire.Heartbeat(asks=asks)),
            rule=self._rule,
        )
        hello = codec.own_hello(codec.role_to_wire(self.role), self.incarnation)
        session.send(self.event(hello=hello))
        self._sessions.add(session)
        self.session_opened(session)
        error: MeshError = WorkerLost("the session was cancelled")
        try:
            error = await session.run(self)
        finally:
            self._sessions.discard(session)
            self.session_closed(session, is_silent=error.code == "silent")
            _log.info("session closed", gateway=gateway, error=error.message)
        # Who is gone needs no word; who broke a rule is told which.
        if not isinstance(error, WorkerLost):
            raise error


async def _shake_hands(stream: ServerStream[Any, Any]) -> Incarnation:
    try:
        async with asyncio.timeout(HELLO_WITHIN_S):
            command = await stream.receive()
    except TimeoutError:
        raise RemoteProtocolError(f"no hello within {HELLO_WITHIN_S:g} s") from None
    return check_hello(None if command is None else command.hello, wire.Role.GATEWAY)


def check_hello(hello: wire.Hello | None, role: wire.Role) -> Incarnation:
    """Return the peer's incarnation.

    Raises RemoteProtocolError: no hello, no incarnation, another role. IncompatiblePeer: another
    protocol version."""
    greeting = codec.require_hello(hello)
    if greeting.role != role:
        raise RemoteProtocolError(f"expected a {role.name}, not a {greeting.role!r}", param="role")
    return Incarnation(greeting.incarnation)
