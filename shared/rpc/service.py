"""The server's side of a call: declarative servicers on raw grpclib streams.

    service = Servicer(bind(WORKER_SESSION, worker.session))
    async with network.serve(address, [service]) as server: ...

A handler gets a ``ServerStream`` and works in grpclib's task, so it only awaits work that our own
TaskGroups own (a TaskGroup opened inside the handler is fine). It ends a call by returning or by
raising: a ``MeshError`` becomes its gRPC status and the trailer ``pdmesh-error``; anything else is
our bug, logged, and INTERNAL without a word more to the client. This module knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from grpclib.const import Handler as GrpclibHandler
from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError
from h2.exceptions import H2Error

from shared.address import Address, host_of
from shared.errors import (
    DeadlinePassed,
    InvalidRequest,
    InvariantViolated,
    LocalProtocolError,
    MeshError,
    RemoteProtocolError,
    ShuttingDown,
    WorkerLost,
    without_frames,
)
from shared.messages.message_codec import CODEC, MAX_MESSAGE_BYTES, framed, read_message
from shared.rpc.methods import Method
from shared.rpc.status import ERROR_TRAILER, error_to_json, row_of, status_message
from shared.tcp_info import round_trip_s

Request = TypeVar("Request")
Reply = TypeVar("Reply")

_log = structlog.get_logger(__name__)

_SENDS_BEFORE_YIELD = 64
"""grpclib's send does not yield while window and socket have room; a long burst would hold the
loop."""

_LAST_WORD_WITHIN_S = 1.0
"""A call that is cancelled because the server closes still tells its caller."""

FIRST_MESSAGE_S = 30.0
"""A caller that opens a call says what it wants within this time."""

DEADLINE_KEY = "pdmesh-deadline-at"
"""Metadata key under which the server hands a call's deadline, in its own loop time, to it."""

_TAKES_PLAIN_ONLY = (
    (":status", "200"),
    ("content-type", "application/grpc+proto"),
    ("grpc-accept-encoding", "identity"),
)
"""The head of the answer to a compressed message."""

_CALLER_GONE = (H2Error, StreamTerminatedError, OSError)


class ServerStream(Generic[Request, Reply]):
    """One call in progress, as its handler sees it. One task may receive while another sends."""

    metadata: Mapping[str, str]
    """Text metadata of the call; binary keys are dropped."""

    peer: Address
    """Where the caller's connection comes from."""

    deadline_at: float | None
    """Loop time at which the caller gives up; the call then ends with DeadlinePassed."""

    def __init__(self, raw: Any, method: Method[Request, Reply]) -> None:
        self._raw = raw
        self._method = method
        self._num_sends = 0
        self._trailers: dict[str, str] = {}
        metadata: dict[str, Any] = dict(raw.metadata or {})
        self.metadata = {
            key: value
            for key, value in metadata.items()
            if isinstance(value, str) and key != DEADLINE_KEY
        }
        peer = raw.peer.addr() or ("", 0)
        self.peer = Address(host_of(peer), peer[1])
        deadline_at: str | None = metadata.get(DEADLINE_KEY)
        self.deadline_at = None if deadline_at is None else float(deadline_at)

    async def receive(self, *, within_s: float | None = None) -> Request | None:
        """Return the next message, or None when the caller has ended its side.

        Raises InvalidRequest: the bytes are not such a message. TooLarge: over the receive limit.
        DeadlinePassed: none came ``within_s``.
        """
        message = self.receive_nowait()
        if message is not None:
            return message
        try:
            async with asyncio.timeout(within_s):
                return await read_message(self._raw._stream, self._method.request_type)
        except TimeoutError:
            raise DeadlinePassed(
                f"no message came within {within_s:g} s", code="body_timeout"
            ) from None
        except RemoteProtocolError as error:
            raise InvalidRequest(error.message, code=error.code) from error

    def receive_nowait(self) -> Request | None:
        """Return the next message if it has arrived in one piece, else None.

        Raises InvalidRequest, TooLarge: see ``receive``.
        """
        try:
            data = self._raw._stream.buffer.take_message(MAX_MESSAGE_BYTES)
            return None if data is None else CODEC.decode(data, self._method.request_type)
        except RemoteProtocolError as error:
            raise InvalidRequest(error.message, code=error.code) from error

    async def send(self, message: Reply) -> None:
        """Send one message; waits while the caller's window is full, and yields every 64 sends.

        Raises TooLarge: the message is over the limit that peers accept; nothing was sent.
        WorkerLost: the caller is gone.
        """
        try:
            await self._raw.send_message(message)
        except _CALLER_GONE as error:
            raise WorkerLost(f"the caller is gone: {error}") from error
        self._num_sends += 1
        if self._num_sends % _SENDS_BEFORE_YIELD == 0:
            await asyncio.sleep(0)

    def send_nowait(self, message: Reply) -> bool:
        """Send one message if nothing has to wait; False = nothing was sent, ``send`` must do it,
        as it must for the first one.

        Nobody may be amid a ``send``. Raises MeshError: see ``send``.
        """
        if not self._raw._send_initial_metadata_done:
            return False
        data = framed(CODEC.encode(message, self._method.reply_type))
        try:
            return self._raw._stream.send_data_nowait(data)
        except _CALLER_GONE as error:
            raise WorkerLost(f"the caller is gone: {error}") from error

    def set_trailer(self, key: str, value: str) -> None:
        """Add text metadata to the end of the call, e.g. ``pdmesh-receipt``."""
        self._trailers[key] = value

    @property
    def round_trip_s(self) -> float:
        return round_trip_s(self._raw._stream._transport)

    @property
    def connection(self) -> object:
        """What all calls on one connection have in common."""
        return self._raw._stream.connection

    async def _finish(self, error: MeshError | None) -> None:
        """Send the trailers. A caller that is gone needs none."""
        raw = self._raw
        # A handler that has cancelled its call, or refused it, has had its last word.
        if raw._send_trailing_metadata_done or raw._cancel_done:
            return
        status, message, trailers = Status.OK, None, dict(self._trailers)
        if error is not None:
            status, message = row_of(error).grpc, status_message(error)
            trailers[ERROR_TRAILER] = error_to_json(error)
        try:
            if error is not None and error.code == "compressed":
                status = Status.UNIMPLEMENTED  # gRPC's word for it, by which clients do without
                if not raw._send_initial_metadata_done:  # grpclib takes no such name
                    await raw._stream.send_headers(_TAKES_PLAIN_ONLY)
                    raw._send_initial_metadata_done = True
            await raw.send_trailing_metadata(
                status=status, status_message=message, metadata=trailers
            )
        except (H2Error, StreamTerminatedError, OSError, AttributeError):
            return  # AttributeError: grpclib drops its transport when a connection closes


async def refuse(raw: Any, error: MeshError) -> None:
    """End a call of grpclib's with an error before anything of it was read."""
    await raw.send_trailing_metadata(
        status=row_of(error).grpc,
        status_message=status_message(error),
        metadata={ERROR_TRAILER: error_to_json(error)},
    )


StreamHandler = Callable[[ServerStream[Request, Reply]], Awaitable[None]]
UnaryHandler = Callable[[Request, ServerStream[Request, Reply]], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Binding:
    """A method with its handler; made by ``bind`` and ``bind_unary``."""

    method: Method[Any, Any]
    run: Callable[[Any], Awaitable[None]]


def bind(method: Method[Request, Reply], handler: StreamHandler[Request, Reply]) -> Binding:
    """Serve a method with a handler that receives and sends itself."""

    async def run(raw: Any) -> None:
        stream = ServerStream(raw, method)
        try:
            timeout = asyncio.timeout_at(stream.deadline_at)
            try:
                async with timeout:
                    await handler(stream)
            except TimeoutError as error:
                # A TimeoutError of the handler's own is its bug, not the caller's deadline.
                if not timeout.expired():
                    raise
                raise DeadlinePassed("the call's deadline passed") from error
        except MeshError as error:
            await stream._finish(without_frames(error))  # pyright: ignore[reportPrivateUsage]
        except asyncio.CancelledError:
            # By the caller, who is gone then and needs no word, or because the server closes.
            if raw._stream.closable:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORD_WITHIN_S):
                        error = ShuttingDown("the server closed", retry_after_s=1.0)
                        await stream._finish(error)  # pyright: ignore[reportPrivateUsage]
            raise
        except Exception:
            _log.exception("a handler failed", method=method.path)
            error = InvariantViolated("internal error; the server's log says more")
            await stream._finish(error)  # pyright: ignore[reportPrivateUsage]
        else:
            await stream._finish(None)  # pyright: ignore[reportPrivateUsage]

    return Binding(method, run)


def bind_unary(method: Method[Request, Reply], handler: UnaryHandler[Request, Reply]) -> Binding:
    """Serve a method with ``async (request, call) -> reply``."""

    async def answer(stream: ServerStream[Request, Reply]) -> None:
        request = await stream.receive(within_s=FIRST_MESSAGE_S)
        if request is None:
            raise InvalidRequest("the call brought no message")
        await stream.send(await handler(request, stream))

    return bind(method, answer)


class Servicer:
    """The handlers of one gRPC service; what ``Network.serve`` takes."""

    def __init__(self, *bindings: Binding) -> None:
        """Raises LocalProtocolError: no binding, or bindings of two services."""
        services = {binding.method.service for binding in bindings}
        if len(services) != 1:
            raise LocalProtocolError("a servicer has the bindings of exactly one service")
        self.name = services.pop()
        self._bindings = bindings

    def __mapping__(self) -> dict[str, GrpclibHandler]:
        return {
            binding.method.path: GrpclibHandler(
                binding.run,
                binding.method.cardinality,
                binding.method.request_type,
                binding.method.reply_type,
            )
            for binding in self._bindings
        }
