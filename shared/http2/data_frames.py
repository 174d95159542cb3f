"""The fast room of HTTP/2: plain DATA frames of open streams go past h2, all else goes through it.

h2 and grpclib make a dozen objects and sixty calls of every DATA frame, which here carries one
small message. Nearly all of them need none of that: no padding, no end of a stream, on a stream
that is open, within both windows. Such a frame is cut from the bytes or put before them right here,
and h2's books (both windows of both directions, the stream's length so far) are kept as h2 would
have kept them. Whatever is not so plain, the first frame that breaks a rule included, is given to
h2 untouched, so what is refused and how is h2's word alone. Figures: bench/gateway/README.md.

Whether h2 holds the beginning of a frame is asked of h2; nothing is held here. Touches internals of
h2 4.4, which is pinned below 4.5; tests/property/test_rpc_data_frames.py watches the seams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from struct import Struct
from typing import Any

from grpclib.config import Configuration
from grpclib.protocol import Connection, Stream
from h2.connection import ConnectionState, H2Connection
from h2.stream import StreamState

_HEADER = Struct(">HBBBL")  # length (upper 16 bits, lower 8), type, flags, stream
HEADER_BYTES = _HEADER.size
_DATA = 0

_OPEN = (ConnectionState.CLIENT_OPEN, ConnectionState.SERVER_OPEN)
_HEARS = (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)
_SPEAKS = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)

MAX_OWED_BYTES = 64 << 10
"""Read bytes of a connection that h2 may not know of yet: telling it costs as much as a message."""


def take_data(h2: Any, streams: Mapping[int, Stream], data: bytes, at: int) -> int:
    """Give the plain DATA frames that begin ``data[at:]``, which is the beginning of a frame, to
    their streams; return where the first byte for h2 is."""
    if h2.state_machine.state not in _OPEN:
        return at
    window = h2._inbound_flow_control_window_manager
    size, max_bytes = len(data), h2.max_inbound_frame_size
    while at + HEADER_BYTES < size:
        high, low, kind, flags, stream_id = _HEADER.unpack_from(data, at)
        length = high << 8 | low
        begin = at + HEADER_BYTES
        end = begin + length
        # An undefined flag and the reserved bit of the stream (no stream has such a number) are
        # h2's to ignore.
        if kind != _DATA or flags or not length or end > size or length > max_bytes:
            break
        stream, theirs = streams.get(stream_id), h2.streams.get(stream_id)
        if stream is None or theirs is None:
            break
        own_window = theirs._inbound_window_manager
        if (
            theirs.state_machine.state not in _HEARS
            # With a content-length h2 counts what comes against it: its word, so its frames.
            or theirs._expected_content_length is not None
            or length > window.current_window_size
            or length > own_window.current_window_size
        ):
            break
        # From here on h2 must believe that it has seen this frame.
        window.current_window_size -= length
        own_window.current_window_size -= length
        theirs._actual_content_length += length
        stream.buffer.add(data[begin:end], length)
        stream.data_received += length
        at = end
    return at


def bytes_for_h2(h2: Any, data: bytes, at: int) -> int:
    """Return how far h2 must read on from ``data[at]`` until plain DATA frames may follow: to the
    end of the frame whose beginning it holds, else of the frame that begins there and of all that
    follow and are not DATA."""
    size = len(data)
    incoming = h2.incoming_buffer
    if incoming._preamble_len:
        return min(size, at + incoming._preamble_len)
    held = incoming._data
    if held:
        if len(held) < HEADER_BYTES:
            return min(size, at + HEADER_BYTES - len(held))
        return min(size, at + HEADER_BYTES + int.from_bytes(held[:3], "big") - len(held))
    while True:
        at += HEADER_BYTES + int.from_bytes(data[at : at + 3], "big")
        if at + HEADER_BYTES > size:
            return size
        if data[at + 3] == _DATA:
            return at


def is_between_frames(h2: Any) -> bool:
    """Whether h2 expects the beginning of any frame: nothing of one is there, and no block of
    headers goes on."""
    incoming = h2.incoming_buffer
    return not (incoming._data or incoming._preamble_len or incoming._headers_buffer)


class DataConnection(Connection):
    """grpclib's connection, whose plain DATA frames go past h2."""

    def __init__(self, connection: H2Connection, transport: Any, *, config: Configuration) -> None:
        super().__init__(connection, transport, config=config)
        self.h2: Any = connection
        windows = config.http2_stream_window_size, config.http2_connection_window_size
        # h2 opens a window again when half of it was read: what is owed must not keep it from that.
        self._max_owed_bytes = min(MAX_OWED_BYTES, *(window // 8 for window in windows))
        self._owed: dict[int, int] = {}
        self._owed_bytes = 0

    def feed_data(self, streams: Mapping[int, Stream], data: bytes, at: int) -> int:
        """See ``take_data``; counts what was taken."""
        if not is_between_frames(self.h2):
            return at
        end = take_data(self.h2, streams, data, at)
        if end != at:
            self.data_received += end - at
            self.last_data_received = time.monotonic()
        return end

    def ack(self, stream_id: int, size: int) -> None:
        """Count bytes that were read; h2 is told of them in larger sums, of all streams at once."""
        if not size:
            return
        self._owed[stream_id] = self._owed.get(stream_id, 0) + size
        self._owed_bytes += size
        if self._owed_bytes >= self._max_owed_bytes:
            self.settle()

    def settle(self) -> None:
        """Tell h2 of all bytes that were read, so that it may open windows again."""
        owed, self._owed, self._owed_bytes = self._owed, {}, 0
        if not self.is_closing():
            for stream_id, size in owed.items():
                self.h2.acknowledge_received_data(size, stream_id)
            self.flush()

    def write_data(self, stream_id: int, data: bytes) -> bool:
        """Send a DATA frame at once; False = h2 must do it, and nothing was sent.

        Within one stream the caller keeps the order: nobody else may be amid a send.
        """
        h2 = self.h2
        stream = h2.streams.get(stream_id)
        size = len(data)
        if (
            stream is None
            or not 0 < size <= h2.max_outbound_frame_size
            or size > h2.outbound_flow_control_window
            or size > stream.outbound_flow_control_window
            or stream.state_machine.state not in _SPEAKS
            or h2.state_machine.state not in _OPEN
            or not self.write_ready.is_set()
            or self.is_closing()
        ):
            return False
        if h2._data_to_send:  # what h2 has said comes first
            self.flush()
        h2.outbound_flow_control_window -= size
        stream.outbound_flow_control_window -= size
        header = _HEADER.pack(size >> 8, size & 0xFF, _DATA, 0, stream_id)
        self._transport.write(header + data)
        self.data_sent += size
        self.data_send_process()
        return True
