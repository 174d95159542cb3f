"""Our client against our server, over sockets and through memory: the same contract."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from shared import wire
from shared.address import Address
from shared.errors import (
    DeadlinePassed,
    IncompatiblePeer,
    InvalidRequest,
    InvariantViolated,
    MeshError,
    NoBlocks,
    Overloaded,
    ShuttingDown,
    TooLarge,
    WorkerLost,
)
from shared.http2.connection import ConnectionLimits
from shared.rpc.methods import GENERATE, LIST_MODELS, TOKENIZE, WORKER_SESSION, Method
from shared.rpc.network import Network
from shared.rpc.service import ServerStream, Servicer, bind, bind_unary
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from tests.support.calls import call_server_stream, call_unary
from tests.support.echo_service import ANY_PORT, EchoService, ask, echo_server, granted, reserve
from tests.support.memory_network import MemoryNetwork


@pytest.fixture(params=["tcp", "memory"])
def network(request: pytest.FixtureRequest) -> Network:
    return TcpNetwork() if request.param == "tcp" else MemoryNetwork()


async def test_unary_call_returns_its_reply(network: Network) -> None:
    """A unary call brings the request over and the reply back."""
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        reply = await call_unary(channel, TOKENIZE, wire.TokenizeRequest(text="abc"))
    assert (reply.token_ids, reply.max_model_len) == (b"abc", 7)


async def test_server_stream_arrives_in_order_with_trailers(network: Network) -> None:
    """All messages of a server stream arrive in order, then its trailers."""
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        async with call_server_stream(channel, GENERATE, ask("count:300")) as stream:
            indices = [message.first_index async for message in stream]
        assert indices == list(range(300))
        assert stream.trailers["pdmesh-receipt"] == '{"ttft_s":1}'


async def test_bidi_stream_answers_each_message(network: Network) -> None:
    """A bidirectional stream goes back and forth and ends well when the client ends."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        for number in range(5):
            await stream.send(reserve(number), end=number == 4)
            event = await stream.receive()
            assert event is not None
            assert event.granted is not None
            assert event.granted.stream_id == number
        assert await stream.receive() is None
        assert await stream.receive() is None


async def test_sender_and_receiver_may_be_two_tasks(network: Network) -> None:
    """One task sends while another receives on the same stream."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):

        async def send() -> None:
            for number in range(500):
                await stream.send(reserve(number), end=number == 499)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            events = [event async for event in stream]
    numbers = [event.granted.stream_id for event in events if event.granted is not None]
    assert numbers == list(range(500))


async def test_typed_error_crosses_with_all_its_fields(network: Network) -> None:
    """A MeshError that a handler raises is the same MeshError at the client."""
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        async with call_server_stream(channel, GENERATE, ask("refuse")) as stream:
            with pytest.raises(Overloaded) as caught:
                await stream.receive()
        assert caught.value.message == "too much at once, wörld\n"
        assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600"])
async def test_a_long_message_ends_its_call_all_the_same(character: str) -> None:
    """grpcio takes so many bytes of trailers; of more it would wait for the deadline."""

    async def refuse_all(_: wire.TokenizeRequest, __: object) -> wire.TokenizeResponse:
        raise InvalidRequest(character * 30_000)

    servicers = [Servicer(bind_unary(TOKENIZE, refuse_all))]
    async with (
        TcpNetwork().serve(ANY_PORT, servicers) as server,
        grpc.aio.insecure_channel(str(server.address)) as channel,
    ):
        ask_for_ids = channel.unary_unary(TOKENIZE.path, request_serializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask_for_ids(wire.TokenizeRequest(), timeout=10)
    error = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(error.details()) == {character}
    assert len(error.details()) > 200


async def test_messages_before_an_error_are_not_lost(network: Network) -> None:
    """What a server sent before its call failed is read first; then the error is raised."""
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        async with call_server_stream(channel, GENERATE, ask("late:20")) as stream:
            for index in range(20):
                message = await stream.receive()
                assert message is not None
                assert message.first_index == index
            for _ in range(2):
                with pytest.raises(NoBlocks, match="no room left") as caught:
                    await stream.receive()
        assert (caught.value.param, caught.value.code) == ("text", "full")


async def test_sending_after_the_servers_error_raises_that_error(network: Network) -> None:
    """A sender learns why the call failed, not just that it did."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        await stream.send(wire.WorkerCommand(cancel=wire.CancelOrder()))
        with pytest.raises(NoBlocks):
            await stream.receive()
        with pytest.raises(NoBlocks) as caught:
            await stream.send(reserve(1))
        assert caught.value.retry_after_s == 1.5


async def test_bug_in_a_handler_tells_nothing(network: Network) -> None:
    """An unexpected exception ends the call as an internal error without a detail of ours."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("bug")) as stream,
    ):
        with pytest.raises(InvariantViolated) as caught:
            await stream.receive()
    assert "secret" not in caught.value.message


async def test_deadline_ends_the_call_on_both_sides(network: Network) -> None:
    """The client's timeout raises DeadlinePassed there and cancels the handler."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        async with call_server_stream(channel, GENERATE, ask("wait"), timeout_s=0.2) as stream:
            with pytest.raises(DeadlinePassed):
                await stream.receive()
        await service.ended.wait()
        assert service.remaining_s is not None
        assert 0 <= service.remaining_s <= 0.2


async def test_metadata_and_peer_reach_the_handler(network: Network) -> None:
    """A handler sees the call's metadata and where it comes from."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        metadata = {"authorization": "Bearer x"}
        async with call_server_stream(channel, GENERATE, ask("hi"), metadata=metadata) as stream:
            await stream.receive()
    assert service.metadata == {"authorization": "Bearer x"}
    assert service.peer is not None
    assert service.peer.port != server.address.port


async def test_leaving_the_block_cancels_the_handler(network: Network) -> None:
    """A client that leaves its block ends the handler at once."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        async with call_server_stream(channel, GENERATE, ask("wait")):
            await service.started.wait()
        await service.ended.wait()
        assert service.num_cancelled == 1


async def test_cancel_wakes_the_receiver(network: Network) -> None:
    """``cancel`` raises WorkerLost in the task that receives, and that task can go on."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("wait")) as stream,
    ):

        async def receive() -> int:
            with pytest.raises(WorkerLost, match="cancelled"):
                await stream.receive()
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(receive())
            await service.started.wait()
            stream.cancel()
            stream.cancel()
        assert receiver.result() == 0
        await service.ended.wait()


async def test_broken_stream_leaves_timeouts_and_groups_intact(network: Network) -> None:
    """After a stream broke, the timeout and the TaskGroup round it still do their work."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("wait")) as stream,
    ):

        async def fail() -> None:
            raise KeyError("child")

        async def receive() -> str:
            try:
                async with asyncio.TaskGroup() as children, asyncio.timeout(0.05):
                    with pytest.raises(WorkerLost):
                        await stream.receive()
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await asyncio.Event().wait()
                    children.create_task(fail())
                    await asyncio.Event().wait()
            except BaseExceptionGroup as group:
                return repr(group.exceptions)
            return "nothing"

        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(receive())
            await service.started.wait()
            stream.cancel()
        assert receiver.result() == "(KeyError('child'),)"


async def test_cancelled_receiver_is_cancelled_not_failed(network: Network) -> None:
    """When a stream breaks in the very instant that its task is cancelled, cancellation wins."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("wait")) as stream,
    ):
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(stream.receive())
            await service.started.wait()
            stream.cancel()
            receiver.cancel()
        assert receiver.cancelled()


async def test_unknown_method_is_an_incompatible_peer(network: Network) -> None:
    """A server of another release that lacks a method is recognised as such."""
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        with pytest.raises(IncompatiblePeer):
            await call_unary(channel, LIST_MODELS, wire.ListModelsRequest())


async def test_nobody_listening_is_a_lost_worker(network: Network) -> None:
    """Dialling a closed port raises WorkerLost."""
    async with echo_server(network) as (_, server):
        address = server.address
    async with network.channel(address) as channel:
        with pytest.raises(WorkerLost):
            await call_unary(channel, TOKENIZE, wire.TokenizeRequest())


async def test_port_in_use_is_said_clearly(network: Network) -> None:
    """Serving on a taken port raises an OSError that names the address and the reason."""
    async with echo_server(network) as (_, server):
        with pytest.raises(OSError, match=f"{server.address}: the port is in use"):
            async with network.serve(server.address, EchoService().servicers):
                pass


async def test_one_channel_carries_300_streams_at_once(network: Network) -> None:
    """More streams than HTTP/2's usual 100 run on one connection at the same time."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):

        async def one() -> str:
            async with call_server_stream(channel, GENERATE, ask("linger")) as stream:
                message = await stream.receive()
                assert message is not None
                return message.text

        async def release() -> None:
            while service.num_started < 300:
                service.started.clear()
                await service.started.wait()
            service.released.set()

        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(one()) for _ in range(300)]
            tasks.create_task(release())
    assert [call.result() for call in calls] == ["released"] * 300


async def test_burst_of_sends_lets_others_run(network: Network) -> None:
    """A handler that sends without waiting still yields to other tasks of its process."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("count:2000")) as stream,
    ):
        num_turns = 0
        is_done = False

        async def other() -> None:
            nonlocal num_turns
            while not is_done:
                num_turns += 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other())
            num_messages = len([message async for message in stream])
            is_done = True
    assert num_messages == 2000
    assert num_turns >= 2000 // 64


@pytest.mark.parametrize("kind", [TcpNetwork, MemoryNetwork])
async def test_small_windows_hold_nobody_for_ever(kind: Any) -> None:
    """Far more than a window goes both ways, in calls that each leave a rest and in messages larger
    than a window: what was read is always told at last."""
    limits = ConnectionLimits(
        stream_window_bytes=65_535, connection_window_bytes=70_000, keepalive_s=None
    )
    network = kind(limits=limits)
    async with (
        asyncio.timeout(20),
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
    ):
        for number in range(150):
            text = str(number) * 333
            reply = await call_unary(channel, TOKENIZE, wire.TokenizeRequest(text=text))
            assert reply.token_ids == text.encode()
        text = "y" * 200_000
        async with call_server_stream(channel, GENERATE, ask(text)) as stream:
            assert [reply.text async for reply in stream] == [text]
        async with open_stream(channel, WORKER_SESSION) as stream:
            for number in range(100):
                command = reserve(number)
                assert command.order is not None
                command.order.token_ids = bytes(4 * 900)
                if not stream.send_nowait(command):
                    await stream.send(command)
                event = await stream.receive()
                assert event is not None
                assert event.granted is not None
                assert event.granted.stream_id == number


async def test_a_server_sends_and_receives_at_once_what_need_not_wait(network: Network) -> None:
    """Nothing goes before the call's headers; then messages leave without a turn of the loop, in
    order with those that are waited for, and one that has arrived is there without a wait."""
    could: list[bool] = []
    heard: list[int] = []
    has_all = asyncio.Event()

    async def session(call: ServerStream[wire.WorkerCommand, wire.WorkerEvent]) -> None:
        could.append(call.send_nowait(granted(0)))
        await call.send(granted(1))
        could.extend(call.send_nowait(granted(number)) for number in (2, 3))
        await call.send(granted(4))
        command = await call.receive()
        await has_all.wait()
        while command is not None:
            assert command.order is not None
            heard.append(command.order.stream_id)
            command = call.receive_nowait()

    async with (
        network.serve(ANY_PORT, [Servicer(bind(WORKER_SESSION, session))]) as server,
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        for number in range(3):
            await stream.send(reserve(number))
        for number in (1, 2, 3, 4):
            event = await stream.receive()
            assert event is not None
            assert event.granted is not None
            assert event.granted.stream_id == number
        has_all.set()
        assert await stream.receive() is None
    assert could == [False, True, True]
    assert heard == [0, 1, 2]


@pytest.mark.parametrize("kind", [TcpNetwork, MemoryNetwork])
async def test_a_full_window_is_left_to_those_who_wait(kind: Any) -> None:
    """A message that does not fit the caller's window is not sent by halves: waiting sends it."""
    limits = ConnectionLimits(
        stream_window_bytes=65_535, connection_window_bytes=70_000, keepalive_s=None
    )
    text = "x" * 20_000
    could: list[bool] = []

    async def generate(call: ServerStream[wire.GenerateRequest, wire.GenerateResponse]) -> None:
        await call.send(wire.GenerateResponse(text="first"))
        could.extend(call.send_nowait(wire.GenerateResponse(text=text)) for _ in range(5))
        await call.send(wire.GenerateResponse(text=text))

    network = kind(limits=limits)
    async with (
        asyncio.timeout(20),
        network.serve(ANY_PORT, [Servicer(bind(GENERATE, generate))]) as server,
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("")) as stream,
    ):
        texts = [reply.text async for reply in stream]
    assert could == [True, True, True, False, False]
    assert texts == ["first", *[text] * 4]


async def test_a_server_refuses_what_no_peer_would_take_at_once_too(network: Network) -> None:
    """Too large a message raises whoever sends it how; the call goes on."""

    async def generate(call: ServerStream[wire.GenerateRequest, wire.GenerateResponse]) -> None:
        await call.send(wire.GenerateResponse(text="first"))
        with pytest.raises(TooLarge):
            call.send_nowait(wire.GenerateResponse(text="x" * (5 << 20)))
        assert call.send_nowait(wire.GenerateResponse(text="last"))

    async with (
        network.serve(ANY_PORT, [Servicer(bind(GENERATE, generate))]) as server,
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("")) as stream,
    ):
        assert [reply.text async for reply in stream] == ["first", "last"]


async def test_slow_reader_holds_its_own_stream_only(network: Network) -> None:
    """A client that does not read stops its stream's sender; other streams go on."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        async with call_server_stream(channel, GENERATE, ask("flood:200")) as slow:
            await service.started.wait()
            async with call_server_stream(channel, GENERATE, ask("count:50")) as quick:
                assert len([message async for message in quick]) == 50
            received = [len(message.text) async for message in slow]
        assert received == [60_000] * 200


async def test_too_large_a_message_is_refused_before_it_is_sent(network: Network) -> None:
    """A message over the limit raises TooLarge at its sender, and the call can go on."""
    async with (
        echo_server(network) as (_, server),
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        large = wire.WorkerCommand(order=wire.WorkOrder(token_ids=bytes(5 << 20)))
        with pytest.raises(TooLarge):
            await stream.send(large)
        await stream.send(reserve(9))
        event = await stream.receive()
        assert event is not None
        assert event.granted is not None


async def test_damaged_message_is_the_callers_fault(network: Network) -> None:
    """Bytes that are not the message end the call as an invalid request; the next call works."""
    wrong = Method(TOKENIZE.path, TOKENIZE.cardinality, wire.WorkOrder, wire.TokenizeResponse)
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        with pytest.raises(InvalidRequest):
            # Field 1 (stream_id) is a varint, where TokenizeRequest has a string; field 2 is bytes
            # that are not UTF-8.
            await call_unary(
                channel, wrong, wire.WorkOrder(stream_id=1, request_id=b"\xff\xfe" * 8)
            )
        assert (await call_unary(channel, TOKENIZE, wire.TokenizeRequest())).max_model_len == 7


async def test_drain_lets_running_calls_finish_and_refuses_new_ones(network: Network) -> None:
    """While a server drains, a running call ends well and a new one is told to go elsewhere."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        async with call_server_stream(channel, GENERATE, ask("linger")) as stream:
            await service.started.wait()
            async with asyncio.TaskGroup() as tasks:
                draining = tasks.create_task(server.drain(30.0))
                await asyncio.sleep(0)
                with pytest.raises(ShuttingDown):
                    await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
                assert not draining.done()
                service.released.set()
                message = await stream.receive()
                assert message is not None
                assert message.text == "released"
                assert await stream.receive() is None
        assert draining.result() is True


async def test_drain_has_a_limit(network: Network) -> None:
    """A drain whose calls do not end gives up at its limit."""
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
        call_server_stream(channel, GENERATE, ask("wait")),
    ):
        await service.started.wait()
        assert await server.drain(0.05) is False


async def test_closing_server_tells_its_callers(network: Network) -> None:
    """A call that still runs when the server closes ends with ShuttingDown, not with silence."""
    service = EchoService()
    async with asyncio.TaskGroup() as tasks:
        is_up, may_close = asyncio.Event(), asyncio.Event()
        found: list[Address] = []

        async def serve() -> None:
            async with network.serve(ANY_PORT, service.servicers) as server:
                found.append(server.address)
                is_up.set()
                await may_close.wait()

        serving = tasks.create_task(serve())
        await is_up.wait()
        async with network.channel(found[0]) as channel:
            async with call_server_stream(channel, GENERATE, ask("wait")) as stream:
                await service.started.wait()
                may_close.set()
                with pytest.raises(ShuttingDown):
                    await stream.receive()
            await serving
            with pytest.raises(MeshError):
                await call_unary(channel, TOKENIZE, wire.TokenizeRequest())


async def test_channel_connects_again(network: Network) -> None:
    """A channel outlives its server: once another listens on the address, calls work again."""
    async with echo_server(network) as (_, server):
        address = server.address
        channel_context = network.channel(address)
        channel = await channel_context.__aenter__()
        await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
    with pytest.raises(WorkerLost):
        await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
    async with network.serve(address, EchoService().servicers):
        assert (await call_unary(channel, TOKENIZE, wire.TokenizeRequest())).max_model_len == 7
        await channel_context.__aexit__(None, None, None)


async def test_resolve_finds_addresses_and_survives_unknown_names(network: Network) -> None:
    """A numeric host is itself; a name that nobody knows is an empty list, not an error."""
    async with echo_server(network):
        assert await network.resolve("127.0.0.1", 5) == [Address("127.0.0.1", 5)]
    assert await network.resolve("no-such-host.invalid", 5) == []


async def test_calls_leave_no_task_behind(network: Network) -> None:
    """After the server's block no task of a call, a channel or a health watch is left."""
    before = asyncio.all_tasks()
    async with (
        echo_server(network) as (service, server),
        network.channel(server.address) as channel,
    ):
        async with call_server_stream(channel, GENERATE, ask("wait")):
            await service.started.wait()
        with pytest.raises(Overloaded):
            async with call_server_stream(channel, GENERATE, ask("refuse")) as stream:
                await stream.receive()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
