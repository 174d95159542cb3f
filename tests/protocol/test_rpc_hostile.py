"""Bytes that no decent client sends: each costs its sender the call or the connection, nobody
else anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, PingAckReceived
from hyperframe.frame import GoAwayFrame

from shared import wire
from shared.address import Address
from shared.errors import WorkerLost
from shared.http2.connection import ConnectionLimits
from shared.rpc.call_server import CallServer
from shared.rpc.methods import GENERATE, TOKENIZE
from shared.rpc.tcp import TcpNetwork
from tests.support.calls import call_server_stream, call_unary
from tests.support.echo_service import EchoService, ask, echo_server
from tests.support.raw_http2 import RawClient, framed, raw_client

INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNKNOWN, INTERNAL = "3", "8", "2", "13"
UNIMPLEMENTED = "12"


@pytest.fixture
async def server() -> AsyncIterator[CallServer]:
    """A server that must answer a decent client when the test is over."""
    network = TcpNetwork()
    async with echo_server(network) as (_, server):
        yield server
        async with network.channel(server.address) as channel:
            reply = await call_unary(channel, TOKENIZE, wire.TokenizeRequest(text="fine"))
        assert reply.token_ids == b"fine"


async def test_decent_raw_client_is_answered(server: CallServer) -> None:
    """The raw client itself works, so that the refusals below mean something."""
    async with raw_client(server.address) as client:
        message = framed(bytes(wire.TokenizeRequest(text="abc")))
        assert (await client.call(client.headers(TOKENIZE.path), message))["grpc-status"] == "0"
        assert wire.TokenizeResponse.parse(client.data_of(1)[5:]).token_ids == b"abc"


async def test_oversized_message_is_refused_on_its_prefix(server: CallServer) -> None:
    """A message announced as 1 GiB ends the call; no more than one window of it is ever taken."""
    async with raw_client(server.address) as client:
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, client.headers(GENERATE.path))
        client.h2.send_data(stream_id, b"\0" + (1 << 30).to_bytes(4, "big"))
        window = client.h2.local_flow_control_window(stream_id)
        num_sent = 0
        while num_sent + 16384 <= window:
            client.h2.send_data(stream_id, bytes(16384))
            num_sent += 16384
        await client.flush()
        found = await client.answer(stream_id)
    assert found["grpc-status"] == RESOURCE_EXHAUSTED
    assert window <= 4 << 20


async def test_oversized_message_to_a_standard_service_is_refused(server: CallServer) -> None:
    """Health and reflection have the same limit."""
    async with raw_client(server.address) as client:
        headers = client.headers("/grpc.health.v1.Health/Check")
        found = await client.call(headers, b"\0" + (1 << 30).to_bytes(4, "big"))
    assert found["grpc-status"] == RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\0\0", id="cut prefix"),
        pytest.param(b"\0\0\0\0\x09abc", id="cut message"),
        pytest.param(b"", id="no message"),
        pytest.param(framed(b"\x12\xff"), id="cut field"),
        pytest.param(framed(b"\x00\x01"), id="field number 0"),
        pytest.param(framed(b"\x12\x02\xff\xfe"), id="text that is not UTF-8"),
        pytest.param(framed(b"\xff" * 64), id="endless varint"),
        pytest.param(framed(b"\x0b" * 50_000), id="nested groups"),
    ],
)
async def test_damaged_message_is_an_invalid_argument(server: CallServer, data: bytes) -> None:
    """Whatever is wrong with a message, the caller hears INVALID_ARGUMENT."""
    async with raw_client(server.address) as client:
        found = await client.call(client.headers(TOKENIZE.path), data)
    assert found["grpc-status"] == INVALID_ARGUMENT


@pytest.mark.parametrize("path", [TOKENIZE.path, GENERATE.path])
async def test_a_compressed_message_is_unimplemented_and_the_answer_says_what_is_taken(
    server: CallServer, path: str
) -> None:
    """As gRPC's specification wants it, by which a client knows that it is to compress nothing."""
    async with raw_client(server.address) as client:
        headers = [*client.headers(path), ("grpc-encoding", "snappy")]
        found = await client.call(headers, b"\1" + framed(b"abc")[1:])
    assert found["grpc-status"] == UNIMPLEMENTED
    assert found["grpc-accept-encoding"] == "identity"
    assert '"compressed"' in found["pdmesh-error"]


async def test_fuzzed_messages_never_reach_our_bugs(server: CallServer) -> None:
    """Mutated messages are refused or answered; none is an internal or unknown error."""
    source = random.Random(7)
    seed_message = bytes(
        wire.GenerateRequest(
            text="hello",
            messages=[wire.ChatMessage(role="user", content="hi")],
            params=wire.GenerateParams(max_tokens=5, logit_bias={1: 0.5}, stop=["x"]),
        )
    )
    async with raw_client(server.address) as client:
        for _ in range(200):
            data = bytearray(seed_message)
            for _ in range(source.randint(1, 6)):
                data[source.randrange(len(data))] = source.randrange(256)
            cut = bytes(data[: source.randint(0, len(data))])
            found = await client.call(client.headers(TOKENIZE.path), framed(cut))
            assert found["grpc-status"] in ("0", INVALID_ARGUMENT), (cut, found)


async def test_a_megabyte_of_unknown_fields_is_cheap(server: CallServer) -> None:
    """Unknown fields are refused before the message library sees them."""
    async with raw_client(server.address) as client:
        data = b"\xf8\x7f\x01" * 20_000  # 60 kB fits the connection's first window
        started_at = asyncio.get_running_loop().time()
        found = await client.call(client.headers(TOKENIZE.path), framed(data))
    assert found["grpc-status"] == INVALID_ARGUMENT
    assert asyncio.get_running_loop().time() - started_at < 5


async def test_too_many_repeated_entries_are_refused(server: CallServer) -> None:
    """A message of a hundred thousand empty entries is refused, not turned into objects."""
    async with raw_client(server.address) as client:
        await client.read_some()
        entry = b"\x1a\x00"  # field 3, messages, empty
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, client.headers(TOKENIZE.path))
        data = framed(entry * 100_000)
        while data:
            room = min(client.h2.local_flow_control_window(stream_id), 16384)
            if not room:
                assert await client.read_some()
                continue
            client.h2.send_data(stream_id, data[:room])
            data = data[room:]
            await client.flush()
        client.h2.end_stream(stream_id)
        await client.flush()
        found = await client.answer(stream_id)
    assert found["grpc-status"] == RESOURCE_EXHAUSTED


async def test_empty_data_frames_do_not_end_a_message(server: CallServer) -> None:
    """A message that comes in slices with empty frames between them is whole."""
    async with raw_client(server.address) as client:
        message = framed(bytes(wire.TokenizeRequest(text="sliced")))
        found = await client.call(client.headers(TOKENIZE.path), message, chunk=3)
        assert found["grpc-status"] == "0"
        assert wire.TokenizeResponse.parse(client.data_of(1)[5:]).token_ids == b"sliced"


async def test_damaged_binary_metadata_is_dropped(server: CallServer) -> None:
    """Binary metadata that is no base64 does not leave the call without an answer."""
    async with raw_client(server.address) as client:
        headers = client.headers(TOKENIZE.path, ("x-bin", "!"), ("y-bin", "a"))
        assert (await client.call(headers, framed(b"")))["grpc-status"] == "0"


@pytest.mark.parametrize("value", ["soon", "-1S", "", "99999999999999999999999H", "9" * 400 + "H"])
async def test_odd_timeout_ends_one_call_only(server: CallServer, value: str) -> None:
    """A grpc-timeout that is none, or beyond reason, gets an answer."""
    async with raw_client(server.address) as client:
        headers = client.headers(TOKENIZE.path, ("grpc-timeout", value))
        assert "grpc-status" in await client.call(headers, framed(b""))
        assert (await client.call(client.headers(TOKENIZE.path), framed(b"")))["grpc-status"] == "0"


async def test_callers_cannot_set_our_own_deadline_key(server: CallServer) -> None:
    """The key under which the server passes deadlines on is dropped when it comes from outside."""
    async with raw_client(server.address) as client:
        headers = client.headers(TOKENIZE.path, ("pdmesh-deadline-at", "soon"))
        assert (await client.call(headers, framed(b"")))["grpc-status"] == "0"


async def test_request_without_a_path_is_reset(server: CallServer) -> None:
    """A stream that is no request is reset; the connection goes on."""
    async with raw_client(server.address) as client:
        found = await client.call([(":method", "POST"), (":scheme", "http")])
        assert "reset" in found
        assert (await client.call(client.headers(TOKENIZE.path), framed(b"")))["grpc-status"] == "0"


@pytest.mark.parametrize("name", ["user-agent", "authorization", "x-bin", "traceparent"])
async def test_a_header_may_hold_any_bytes(server: CallServer, name: str) -> None:
    """Latin-1 and UTF-8 are answered as if the header were not there; a path is unknown."""
    async with raw_client(server.address) as client:
        for value in ("\xe9", "\xc3\xa9"):
            headers = [
                (key.encode(), text.encode("latin-1"))
                for key, text in client.headers(TOKENIZE.path, (name, value))
            ]
            assert (await client.call(headers, framed(b"")))["grpc-status"] == "0"
            found = await client.call(client.headers(TOKENIZE.path + value), framed(b""))
            assert found["grpc-status"] == UNIMPLEMENTED


async def test_a_client_that_says_goodbye_gets_its_answer() -> None:
    """GOAWAY without an error lets calls in progress end well; with one it cancels them."""
    async with echo_server(TcpNetwork()) as (service, server), raw_client(server.address) as client:
        request = framed(bytes(wire.GenerateRequest(text="linger")))
        for code in (ErrorCodes.NO_ERROR, ErrorCodes.PROTOCOL_ERROR):
            stream_id = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream_id, client.headers(GENERATE.path))
            client.h2.send_data(stream_id, request, end_stream=True)
            await client.flush()
            await service.started.wait()
            client.writer.write(GoAwayFrame(0, error_code=code).serialize())
            client.h2.ping(b"12345678")
            await client.flush()
            if code is ErrorCodes.NO_ERROR:
                while not any(isinstance(event, PingAckReceived) for event in client.events):
                    assert await client.read_some()
                service.released.set()
                assert (await client.answer(stream_id))["grpc-status"] == "0"
                service.started.clear()
                service.released.clear()
        assert not await client.answer(stream_id)
    assert service.num_cancelled == 1


async def test_a_server_that_says_goodbye_finishes_its_answers() -> None:
    """Calls up to the last that it names go on, later ones are lost; the next takes another
    connection, and the one that was left is closed with its last call."""
    async with (
        echo_server(TcpNetwork()) as (service, server),
        TcpNetwork().channel(server.address) as channel,
    ):
        async with (
            call_server_stream(channel, GENERATE, ask("linger")) as first,
            call_server_stream(channel, GENERATE, ask("linger")) as second,
        ):
            while service.num_started < 2:
                await service.started.wait()
                await asyncio.sleep(0)
            (left,) = server._protocols
            for last in (2**31 - 1, 1):  # as proxies do: one that refuses nothing comes first
                left._transport.write(GoAwayFrame(0, last_stream_id=last).serialize())
            with pytest.raises(WorkerLost):
                await second.receive()
            reply = await call_unary(channel, TOKENIZE, wire.TokenizeRequest(text="fine"))
            assert reply.token_ids == b"fine"
            assert len(server._protocols) == 2
            service.released.set()
            assert [message.text async for message in first] == ["released"]
        await asyncio.wait_for(left.closed.wait(), 5)


async def test_random_bytes_cost_the_connection(server: CallServer) -> None:
    """Connections that speak no HTTP/2 are closed."""
    source = random.Random(3)
    for size in (1, 24, 100, 5000):
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(source.randbytes(size))
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        writer.close()


async def _until_closed(client: RawClient) -> ErrorCodes | int | None:
    while await client.read_some():
        pass
    codes = [e.error_code for e in client.events if isinstance(e, ConnectionTerminated)]
    return codes[-1] if codes else None


async def test_overlong_frame_is_refused_on_its_header(server: CallServer) -> None:
    """A frame that announces 16 MiB closes the connection before any of it is awaited."""
    async with raw_client(server.address) as client:
        client.writer.write(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        assert await _until_closed(client) == ErrorCodes.FRAME_SIZE_ERROR


async def test_rapid_reset_closes_the_connection(server: CallServer) -> None:
    """Opening and resetting streams by the hundred is answered with the end of the connection."""
    async with raw_client(server.address) as client:
        for _ in range(700):
            stream_id = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream_id, client.headers(GENERATE.path))
            client.h2.reset_stream(stream_id)
        await client.flush()
        assert await _until_closed(client) == ErrorCodes.ENHANCE_YOUR_CALM


async def test_ping_flood_closes_the_connection(server: CallServer) -> None:
    """Pings without end are answered with the end of the connection."""
    async with raw_client(server.address) as client:
        for _ in range(5000):
            client.h2.ping(b"12345678")
        await client.flush()
        assert await _until_closed(client) == ErrorCodes.ENHANCE_YOUR_CALM


async def test_decent_cancels_are_not_counted_as_an_attack() -> None:
    """A client that cancels fewer than half of its many calls keeps its connection."""
    network = TcpNetwork()
    async with echo_server(network) as (_, server), raw_client(server.address) as client:
        for number in range(700):
            if number % 3 == 0:
                stream_id = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream_id, client.headers(GENERATE.path))
                client.h2.reset_stream(stream_id)
            else:
                found = await client.call(client.headers(TOKENIZE.path), framed(b""))
                assert found["grpc-status"] == "0"


async def test_calls_reset_at_once_give_their_window_back() -> None:
    """Calls that are reset in the instant they come keep nothing of their connection's window:
    ten of them take twice as much as it has, and the next call is answered."""
    network = TcpNetwork(limits=ConnectionLimits(connection_window_bytes=80_000))
    async with echo_server(network) as (_, server), raw_client(server.address) as client:
        async with asyncio.timeout(10):
            for _ in range(10):
                stream_id = client.h2.get_next_available_stream_id()
                client.h2.send_headers(stream_id, client.headers(GENERATE.path))
                while client.h2.local_flow_control_window(stream_id) < 16384:
                    assert await client.read_some()
                client.h2.send_data(stream_id, bytes(16384))
                client.h2.reset_stream(stream_id)
                await client.flush()
            found = await client.call(client.headers(TOKENIZE.path), framed(b""))
    assert found["grpc-status"] == "0"


async def test_too_many_connections_are_turned_away() -> None:
    """At its limit a server closes what asks nothing, and else turns away who comes."""
    service = EchoService()
    calls = CallServer(service.servicers, max_connections=2)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(calls.protocol, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    address = Address(host, port)
    async with raw_client(address) as one, raw_client(address) as two:
        one.h2.send_headers(one.h2.get_next_available_stream_id(), one.headers(GENERATE.path))
        await one.flush()  # a call that goes on
        assert (await one.call(one.headers(TOKENIZE.path), framed(b"")))["grpc-status"] == "0"
        async with raw_client(address) as three:
            assert await _until_closed(two) == ErrorCodes.NO_ERROR
            three.h2.send_headers(1, three.headers(GENERATE.path))
            for client in (one, three):
                message = framed(bytes(ask("hello")))
                found = await client.call(client.headers(GENERATE.path), message)
                assert found["grpc-status"] == "0"
            async with raw_client(address) as four:
                assert await _until_closed(four) == ErrorCodes.REFUSED_STREAM
    listener.close()
    await calls.close()
    await listener.wait_closed()
