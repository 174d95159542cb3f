"""DATA that goes past h2 has the same effect as DATA that goes through it, however the bytes are
cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from grpclib.protocol import AbstractHandler, H2Protocol, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingReceived
from h2.stream import StreamState
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from shared.http2.connection import ConnectionLimits, GuardedProtocol
from shared.http2.inbound_buffer import InboundBuffer

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION, UNKNOWN = (
    0, 1, 3, 4, 6, 7, 8, 9, 0xA0
)  # fmt: skip
END_STREAM, END_HEADERS, PADDED, UNDEFINED = 1, 4, 8, 0x40
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

LIMITS = ConnectionLimits(
    frame_bytes=16_384, stream_window_bytes=65_535, connection_window_bytes=70_000,
    keepalive_s=None,
)  # fmt: skip
"""Windows that a few frames fill."""


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_shut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        self.sent += bytes(data)

    def is_closing(self) -> bool:
        return self.is_shut

    def close(self) -> None:
        self.is_shut = True


class Calls(AbstractHandler):
    """Keeps the streams of calls."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.ended: list[int] = []
        self.is_closed = False

    def accept(self, stream: Stream, headers: Any, release_stream: Callable[[], None]) -> None:
        assert stream.id is not None
        self.streams[stream.id] = stream

    def cancel(self, stream: Stream) -> None:
        assert stream.id is not None
        self.ended.append(stream.id)

    def close(self) -> None:
        self.is_closed = True


class End:
    """A server's end of a connection whose other end is the test."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.wire = Wire()
        self.calls = Calls()
        self.protocol = GuardedProtocol(self.calls, limits, is_client=False)
        self.protocol.connection_made(self.wire)
        self.link: Any = self.protocol.connection
        self.h2: Any = self.link.h2

    def facts(self) -> dict[str, Any]:
        """What an application and the peer can know of it."""
        streams = {}
        for stream_id, stream in self.calls.streams.items():
            buffer: Any = stream.buffer
            theirs = self.h2.streams.get(stream_id)
            streams[stream_id] = (
                b"".join(data for data, _ in buffer._arrived),
                [size for _, size in buffer._arrived],
                buffer._eof,
                stream_id in self.calls.ended,
                stream.data_received,
                None if theirs is None else theirs.state_machine.state,
                None if theirs is None else theirs.inbound_flow_control_window,
                None if theirs is None else theirs._actual_content_length,
            )
        return {
            "streams": streams,
            "closed": self.calls.is_closed,
            "state": self.h2.state_machine.state,
            "window": None if self.calls.is_closed else self.h2.inbound_flow_control_window,
            "sent": self.wire.sent,
        }


def frame(kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
    """One frame, whatever it says."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + body


STREAM = st.sampled_from([1, 1, 1, 3, 5, 7])
SIZE = st.sampled_from([0, 1, 5, 100, 7_000, 16_384, 16_384, 16_384])
_DATA = st.tuples(
    st.just("data"), STREAM, SIZE, st.sampled_from([0, 0, 0, 0, END_STREAM, PADDED, UNDEFINED])
)
_OTHER = st.one_of(
    st.tuples(st.just("open"), STREAM, st.sampled_from([None, None, 5, 101])),
    st.tuples(st.just("trailers"), STREAM),
    st.tuples(st.just("split headers"), STREAM),
    st.tuples(st.just("reset"), STREAM),
    st.tuples(st.just("answer"), STREAM),
    st.sampled_from(
        [("ping",), ("settings",), ("window",), ("unknown",), ("reserved",), ("goaway",)]
    ),
)
STEPS = st.lists(st.one_of(_DATA, _DATA, _OTHER), max_size=24)


def frames_of(steps: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """The bytes of each step, as a client would send them that heeds no rule."""
    encoder = Encoder()

    def headers(*more: tuple[str, str]) -> bytes:
        return encoder.encode([(":method", "POST"), (":path", "/a"), (":scheme", "http"), *more])

    found = [PREFACE + frame(SETTINGS, 0, 0, b"")]
    found += [frame(HEADERS, END_HEADERS, stream_id, headers()) for stream_id in (1, 3, 5)]
    for step in steps:
        match step:
            case ("data", stream_id, size, flags):
                body = bytes([3]) + bytes(size) + bytes(3) if flags == PADDED else bytes(size)
                found.append(frame(DATA, flags, stream_id, body[:16_384]))
            case ("open", stream_id, length):
                more = [] if length is None else [("content-length", str(length))]
                found.append(frame(HEADERS, END_HEADERS, stream_id, headers(*more)))
            case ("trailers", stream_id):
                body = encoder.encode([("a", "b")])
                found.append(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, body))
            case ("split headers", stream_id):
                body = headers()
                found.append(frame(HEADERS, 0, stream_id, body[:5]))
                found.append(frame(CONTINUATION, END_HEADERS, stream_id, body[5:]))
            case ("half headers", stream_id):
                found.append(frame(HEADERS, 0, stream_id, headers()[:5]))
            case ("reset", stream_id):
                found.append(frame(RST_STREAM, 0, stream_id, bytes(4)))
            case ("ping",):
                found.append(frame(PING, 0, 0, bytes(8)))
            case ("settings",):
                found.append(frame(SETTINGS, 0, 0, b"\0\4\0\1\0\0"))
            case ("window",):
                found.append(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\5"))
            case ("unknown",):
                found.append(frame(UNKNOWN, 0, 1, b"abc"))
            case ("reserved",):
                found.append(frame(DATA, 0, 1 << 31 | 1, b"abc"))
            case ("goaway",):
                found.append(frame(GOAWAY, 0, 0, bytes(8)))
            case _:
                assert step[0] == "answer"
    return found


@given(steps=STEPS, cuts=st.lists(st.integers(1, 200_000), max_size=12))
def test_any_cut_of_any_bytes_has_the_effect_that_h2_gives_them(
    steps: list[tuple[Any, ...]], cuts: list[int]
) -> None:
    """Data, windows, ends and every byte that goes back are those of plain h2, which gets frame by
    frame. Where it ends the connection it is ended, too, and nobody got what h2 would not give."""
    assert_alike(steps, cuts)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([("data", 1, 16_384, 0)] * 4, id="more than the stream's window"),
        pytest.param([("data", i, 16_384, 0) for i in (1, 3, 5, 1, 3)], id="than the connection's"),
        pytest.param([("open", 7, 5), ("data", 7, 100, 0)], id="more than the announced length"),
        pytest.param([("half headers", 7), ("data", 1, 5, 0)], id="amid a block of headers"),
        pytest.param([("data", 9, 5, 0)], id="on a stream that was never opened"),
        pytest.param([("data", 1, 5, END_STREAM), ("data", 1, 5, 0)], id="after the end"),
        pytest.param([("reset", 1), ("data", 1, 5, 0)], id="after a reset"),
        pytest.param([("goaway",), ("data", 1, 5, 0)], id="after the last word"),
        pytest.param([("reserved",), ("data", 1, 5, 0)], id="with the reserved bit"),
    ],
)
@pytest.mark.parametrize("cut", [[], [50], [120, 130]])
def test_what_h2_refuses_is_refused(steps: list[tuple[Any, ...]], cut: list[int]) -> None:
    """Data that breaks a rule, behind data that does not."""
    assert_alike([("data", 1, 5, 0), *steps], cut)


def assert_alike(steps: Sequence[tuple[Any, ...]], cuts: Sequence[int]) -> None:
    """Give the same bytes to plain h2 and to ours, and compare."""
    parts = frames_of(steps)

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        plain, fast = End(), End()
        for part in parts:
            if not plain.link.is_closing():
                H2Protocol.data_received(plain.protocol, part)
        data = b"".join(parts)
        edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
        for begin, end in itertools.pairwise(edges):
            fast.protocol.data_received(data[begin:end])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return plain.facts(), fast.facts()

    plain, fast = asyncio.run(run())
    if not plain["closed"]:
        assert fast == plain
        return
    # h2 forgets the events of frames that came in one piece with the one that ended it.
    assert fast["closed"], steps
    for stream_id, (data, *_) in fast["streams"].items():
        assert plain["streams"][stream_id][0].startswith(data)


@given(
    more=st.sampled_from([0, 100_000]),
    sizes=st.lists(st.sampled_from([1, 500, 16_384, 16_384, 16_384, 16_385]), max_size=12),
    ends_at=st.sampled_from([2, 12]),
)
def test_what_is_written_past_h2_is_what_a_peer_may_get(
    sizes: list[int], ends_at: int, more: int
) -> None:
    """A plain client reads every byte in order; both ends agree on both windows after every send,
    and a send that h2 must do changes nothing."""

    async def run() -> None:
        end = End()
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        if more:
            client.increment_flow_control_window(more)
        client.send_headers(
            1, [(":method", "POST"), (":path", "/a"), (":scheme", "http"), (":authority", "a")]
        )
        end.protocol.data_received(client.data_to_send())
        stream: Any = end.calls.streams[1]
        await stream.send_headers([(":status", "200")])
        read = sent = b""
        for number, size in enumerate(sizes):
            if number == ends_at:
                await stream.end()
            data = bytes([number]) * size
            end.h2.ping(bytes(8))  # not flushed: it leaves before what follows
            window = end.h2.local_flow_control_window(1)
            may = size <= min(window, end.h2.max_outbound_frame_size) and number < ends_at
            assert stream.send_data_nowait(data) == may
            sent += data if may else b""
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            end.link.flush()
            events = client.receive_data(end.wire.sent)
            if may:
                kinds = [type(event) for event in events]
                assert kinds.index(PingReceived) < kinds.index(DataReceived)
            end.wire.sent = b""
            read += b"".join(getattr(event, "data", b"") for event in events)
            assert read == sent
            assert client.inbound_flow_control_window == end.h2.outbound_flow_control_window
            theirs = client.streams.get(1)
            ours = end.h2.streams[1]
            if theirs is not None and ours.state_machine.state is StreamState.OPEN:
                assert theirs.inbound_flow_control_window == ours.outbound_flow_control_window

    asyncio.run(run())


# --- the buffer of one stream ---------------------------------------------------------------------


@given(
    messages=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    in_steps=st.booleans(),
)
def test_messages_come_out_as_they_went_in(
    messages: list[bytes], cuts: list[int], in_steps: bool
) -> None:
    """Cut out of a chunk or put together, in order, every byte acknowledged once; a read that is
    cancelled loses nothing."""
    data = b"".join(len(message).to_bytes(5, "big") + message for message in messages)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[begin:end] for begin, end in itertools.pairwise(edges)]

    async def run() -> None:
        acked: list[int] = []
        buffer = InboundBuffer(acked.append)

        async def feed() -> None:
            for chunk in chunks:
                buffer.add(chunk, len(chunk) + 1)
                if in_steps:
                    await asyncio.sleep(0)
            buffer.eof()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            for message in messages:
                found = buffer.take_message(1 << 20)
                if found is None:
                    reader = tasks.create_task(buffer.read(5))
                    await asyncio.sleep(0)
                    if not reader.done():
                        reader.cancel()
                        prefix = await buffer.read(5)
                    else:
                        prefix = reader.result()
                    found = await buffer.read(int.from_bytes(prefix, "big"))
                assert found == message
            assert await buffer.read(1) == b""
        assert buffer.unacked_size() == 0
        assert sum(acked) == len(data) + len(chunks)

    asyncio.run(run())
