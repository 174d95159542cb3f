"""HTTP/2 connections with limits: grpclib's, minus what a stranger could do to them.

More streams at once than h2's default of 100, larger frames, no delay of small writes; a budget for
streams that are opened and reset at once ("rapid reset") and for control frames; unknown events and
broken HTTP/2 end a connection, never the process. Works on any asyncio transport. Subclasses
internals of grpclib 0.4.9, which is therefore pinned; the tests of this folder watch the seams.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import structlog
from grpclib.client import Handler as GrpclibClientHandler
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import AbstractHandler, Connection, EventsProcessor, H2Protocol, Stream
from grpclib.utils import Wrapper
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    UnknownFrameReceived,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from shared.http2.complaints import Complaints
from shared.http2.data_frames import DataConnection, bytes_for_h2
from shared.http2.inbound_buffer import InboundBuffer
from shared.http2.turn_writer import TurnWriter
from shared.messages.message_codec import MAX_MESSAGE_BYTES

_log = structlog.get_logger(__name__)

_DEFAULT_WINDOW_BYTES = 65_535
"""Of a connection, in HTTP/2."""

_CONTROL_EVENTS = (PingReceived, PriorityUpdated, RemoteSettingsChanged, UnknownFrameReceived)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may ask of us.

    After ``reset_grace`` streams, a connection of which more than half were reset within
    ``reset_within_s`` of their start is closed. keepalive_s: HTTP/2 pings; None = none (heartbeats
    above notice a silent peer sooner, pings only clear away what is idle and dead). close_within_s:
    so long a closed connection may go on sending what it has.
    """

    max_streams: int = 4096
    frame_bytes: int = 1 << 18
    stream_window_bytes: int = 4 << 20
    connection_window_bytes: int = 16 << 20
    reset_grace: int = 500
    reset_within_s: float = 1.0
    control_frames_per_s: int = 1000
    keepalive_s: float | None = 10.0
    keepalive_timeout_s: float = 10.0
    close_within_s: float = 5.0

    def configuration(self) -> Configuration:
        """Return them in grpclib's terms."""
        more: dict[str, Any] = {}
        if self.keepalive_s is not None:
            more = {
                "_keepalive_timeout": self.keepalive_timeout_s,
                "_keepalive_permit_without_calls": True,
                # grpclib stops after two pings on a connection without data; 0 = it never does.
                "_http2_max_pings_without_data": 0,
                "_http2_min_sent_ping_interval_without_data": self.keepalive_s / 2,
            }
        return Configuration(
            _keepalive_time=self.keepalive_s,
            http2_connection_window_size=self.connection_window_bytes,
            http2_stream_window_size=self.stream_window_bytes,
            **more,
        )


def h2_configuration(*, is_client: bool) -> H2Configuration:
    """Return what grpclib's own server and client use, but that a header may hold any bytes (RFC
    9110, 5.5): one in a header that nobody reads would end all calls of its connection."""
    return H2Configuration(
        client_side=is_client,
        header_encoding="latin-1",
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )


class _PatientH2(H2Connection):
    """A state machine that goes on when the other end says goodbye with calls in progress."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        # h2 takes it for the end of the connection. Without an error it says that its sender makes
        # no further calls, or takes none after the last it names: it closes the connection when all
        # have their answers (RFC 9113, 6.8).
        if frame.error_code != ErrorCodes.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        events: list[Event] = [
            StreamReset(stream_id=stream_id, error_code=ErrorCodes.REFUSED_STREAM)
            for stream_id in self.streams
            if self._stream_id_is_outbound(stream_id) and stream_id > frame.last_stream_id
        ]
        return [], [UnknownFrameReceived(frame=frame), *events]  # counted among control frames


class GuardedStream(Stream):
    """Refuses to buffer more than one message may have, for whoever reads (health and reflection
    use grpclib's own reader). Plain DATA takes the short way (``data_frames.py``)."""

    connection: GuardedConnection
    buffer: InboundBuffer

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        super().init_stream(stream_id, connection)
        self.buffer = InboundBuffer(partial(connection.ack, stream_id))

    async def send_headers(self, headers: Any, end_stream: bool = False) -> None:
        # The last word of a call whose caller has reset it has nobody who would read it, and would
        # wait for a full connection for ever.
        if not self.closable:
            raise StreamClosedError(self.id or 0)
        await super().send_headers(headers, end_stream)

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        if end_stream or not self.send_data_nowait(data):
            await super().send_data(data, end_stream)

    def send_data_nowait(self, data: bytes) -> bool:
        """Send bytes, at once; False = ``send_data`` must do it, and nothing was sent."""
        if self.id is None or not self.connection.write_data(self.id, data):
            return False
        self.data_sent += len(data)
        return True

    async def recv_data(self, size: int) -> bytes:
        if size > MAX_MESSAGE_BYTES:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "the message is too large")
        return await super().recv_data(size)


class GuardedConnection(DataConnection):
    """Makes our streams; one that is closed is gone soon, whether or not its peer reads."""

    def __init__(
        self, h2: H2Connection, transport: Any, limits: ConnectionLimits, config: Configuration
    ) -> None:
        super().__init__(h2, transport, config=config)
        self._close_within_s = limits.close_within_s
        self._aborting: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection when all is sent, or at its limit: a peer that reads nothing would
        keep it, and the calls on it, for ever."""
        if hasattr(self, "_transport"):  # once
            loop = asyncio.get_running_loop()
            self._aborting = loop.call_later(self._close_within_s, self._transport.abort)
        super().close()

    def lost(self) -> None:
        """Note that the transport is gone."""
        if self._aborting is not None:
            self._aborting.cancel()

    def create_stream(
        self, *, stream_id: int | None = None, wrapper: Wrapper | None = None
    ) -> GuardedStream:
        return GuardedStream(
            self, self._connection, self._transport, stream_id=stream_id, wrapper=wrapper
        )


class _Budget:
    """Counts what costs us much and the peer little."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._opened_at: dict[int, float] = {}
        self._num_opened = 0
        self._num_quick_resets = 0
        self._second = 0
        self._num_control = 0

    def is_exceeded(self, event: Event) -> bool:
        if isinstance(event, RequestReceived):
            self._num_opened += 1
            self._opened_at[event.stream_id] = self._clock()
        elif isinstance(event, StreamEnded):
            self._opened_at.pop(event.stream_id, None)
        # A stream that is reset at once costs a handler its start and its cancellation, and the
        # peer two small frames. A client that leaves amid a few answers is none of these: more than
        # half must be.
        elif isinstance(event, StreamReset):
            opened_at = self._opened_at.pop(event.stream_id, None)
            if opened_at is not None and self._clock() - opened_at < self._limits.reset_within_s:
                self._num_quick_resets += 1
                return (
                    self._num_opened > self._limits.reset_grace
                    and self._num_quick_resets * 2 > self._num_opened
                )
        # These frames take nothing of any window, so flow control does not hold them back; nor does
        # it an empty DATA frame.
        elif isinstance(event, _CONTROL_EVENTS) or (
            isinstance(event, DataReceived) and not event.flow_controlled_length
        ):
            second = int(self._clock())
            if second != self._second:
                self._second, self._num_control = second, 0
            self._num_control += 1
            return self._num_control > self._limits.control_frames_per_s
        return False


class GuardedProcessor(EventsProcessor):
    """Dispatches HTTP/2 events; spends the connection's budget first.

    complain: logs why the connection is closed.
    """

    def __init__(
        self,
        handler: AbstractHandler,
        connection: Connection,
        limits: ConnectionLimits,
        complain: Callable[[str], None],
    ) -> None:
        super().__init__(handler, connection)
        self._budget = _Budget(limits, asyncio.get_running_loop().time)
        self._complain = complain

    def process(self, event: Event) -> None:
        if not hasattr(self, "processors"):  # closed: what was read with the last straw is nothing
            return
        if self._budget.is_exceeded(event):
            self._complain(f"too many of {type(event).__name__}")
            self.goodbye(ErrorCodes.ENHANCE_YOUR_CALM)
        elif isinstance(event, DataReceived) and not event.flow_controlled_length:
            return  # grpclib takes an empty frame for the end of the stream
        elif isinstance(event, UnknownFrameReceived) and isinstance(event.frame, GoAwayFrame):
            if isinstance(self.handler, GrpclibClientHandler):
                self.handler.close()  # its channel makes another connection for the next call
                self._close_if_left()
        elif type(event) in getattr(self, "processors", ()):
            super().process(event)

    def register(self, stream: Stream) -> Callable[[], None]:
        release = super().register(stream)

        def release_stream() -> None:
            release()
            self._close_if_left()

        return release_stream

    def _close_if_left(self) -> None:
        """Close a connection that takes no calls any more, once those that there are have ended."""
        if getattr(self.handler, "connection_lost", False) and not self.streams:
            self.close()

    def goodbye(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Close the connection and say so (GOAWAY); every stream on it ends."""
        if not self.connection.is_closing():
            try:
                self.connection._connection.close_connection(code)  # pyright: ignore[reportPrivateUsage]
                self.connection.flush()
            except ProtocolError:
                pass  # it was closed already
        self.close("the connection was closed")

    def close(self, reason: str = "Connection closed") -> None:
        if hasattr(self, "processors"):  # once
            super().close(reason)
            del self._complain  # its protocol, which knows this one


class GuardedProtocol(H2Protocol):
    """One connection, either side. ``closed`` is set when its transport is gone. has_heard: whether
    one byte has come from the other end.

    complaints: shared by all connections of a server.
    """

    def __init__(
        self,
        handler: AbstractHandler,
        limits: ConnectionLimits,
        *,
        is_client: bool,
        complaints: Complaints | None = None,
    ) -> None:
        config = limits.configuration()
        config = config.__for_client__() if is_client else config.__for_server__()
        super().__init__(handler, config, h2_configuration(is_client=is_client))
        self._limits = limits
        self._complaints = complaints or Complaints()
        self.closed = asyncio.Event()
        self.has_heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writer: Any = TurnWriter(cast("asyncio.Transport", transport))
        self._transport = cast("asyncio.Transport", writer)
        link: socket.socket | None = transport.get_extra_info("socket")
        if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
            # Nagle's algorithm would hold a token back until the one before it is acknowledged.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = self._link = GuardedConnection(
            self._new_h2(), self._transport, self._limits, self.config
        )
        self.connection.flush()
        self.connection.initialize()
        self._guarded = GuardedProcessor(
            self.handler, self.connection, self._limits, self._complain
        )
        self.processor = self._guarded

    def _new_h2(self) -> H2Connection:
        """Return the state machine with our settings in its very first frame: a peer may open its
        streams in the same instant, and must not be held to h2's defaults."""
        limits = self._limits
        is_client = bool(self.h2_config.client_side)
        h2 = _PatientH2(config=self.h2_config)
        h2.local_settings = Settings(
            client=is_client,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.max_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                SettingCodes.MAX_FRAME_SIZE: limits.frame_bytes,
            },
        )
        h2.max_inbound_frame_size = limits.frame_bytes
        h2.initiate_connection()
        # SETTINGS reach the windows of streams alone (RFC 9113, 6.9.2): a connection's own grows by
        # this.
        h2.increment_flow_control_window(limits.connection_window_bytes - _DEFAULT_WINDOW_BYTES)
        return h2

    def data_received(self, data: bytes) -> None:
        connection, streams, at = self._link, self._guarded.streams, 0
        self.has_heard = True
        try:
            while not connection.is_closing():
                at = connection.feed_data(streams, data, at)
                if at == len(data):
                    break
                # h2 gets no more than what is its own, so that plain DATA behind it takes the short
                # way again.
                end = bytes_for_h2(connection.h2, data, at)
                super().data_received(data[at:end])
                at = end
                # Before the rest of such a frame is collected: h2 would hold up to 16 MiB of it.
                if not connection.is_closing() and self._has_overlong_frame():
                    self.goodbye(ErrorCodes.FRAME_SIZE_ERROR)
        except Exception as error:  # bytes of a stranger must end nothing but their connection
            if not self.connection.is_closing():
                self._complain(f"not HTTP/2: {type(error).__name__}")
                self.processor.close("Protocol error")

    def _complain(self, reason: str) -> None:
        """Say why the connection is closed, unless another one was the reason for a line just now:
        whoever floods us must not fill the log."""
        count = self._complaints.count(asyncio.get_running_loop().time())
        if count is not None:
            host, *_ = self._transport.get_extra_info("peername") or ("",)
            more = {"count": count} if count else {}  # not told since the line before
            _log.warning("closing a connection", reason=reason, peer=host, **more)

    def _has_overlong_frame(self) -> bool:
        """h2 looks at a frame's length only when all of it, up to 16 MiB, has arrived."""
        waiting = self.connection._connection.incoming_buffer._data  # pyright: ignore[reportPrivateUsage]
        return len(waiting) >= 9 and int.from_bytes(waiting[:3], "big") > self._limits.frame_bytes

    def goodbye(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Close the connection and say so."""
        self._guarded.goodbye(code)

    def abort(self) -> None:
        """Drop the connection without another byte."""
        self._transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.processor.close("Connection lost")
        self._link.lost()
        self.closed.set()


def client_protocol(limits: ConnectionLimits) -> GuardedProtocol:
    """Return the client's end of a connection to come."""
    return GuardedProtocol(GrpclibClientHandler(), limits, is_client=True)
