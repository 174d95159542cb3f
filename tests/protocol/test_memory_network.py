"""The network in memory: faults that a test may cause, and virtual time."""

from __future__ import annotations

import asyncio

import pytest

from shared import wire
from shared.address import Address
from shared.errors import DeadlinePassed, MeshError, WorkerLost
from shared.rpc.methods import GENERATE, TOKENIZE, WORKER_SESSION
from shared.rpc.stream import open_stream
from tests.support.calls import call_server_stream, call_unary
from tests.support.echo_service import EchoService, ask, echo_server, reserve
from tests.support.memory_network import MemoryFabric, MemoryNetwork
from tests.support.virtual_loop import Deadlock, run_virtual

SERVER = Address("decode-0", 9000)


def test_a_day_of_protocol_takes_no_time_and_repeats_exactly() -> None:
    """Under virtual time a stream lives a day, and two runs are the same to the bit."""

    async def day() -> list[tuple[float, int]]:
        network = MemoryNetwork(MemoryFabric(lambda source, target: 0.003))
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, int]] = []
        async with (
            network.serve(SERVER, EchoService().servicers),
            network.channel(SERVER) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            for minute in range(24 * 60):
                await stream.send(reserve(minute))
                event = await stream.receive()
                assert event is not None
                assert event.granted is not None
                seen.append((loop.time(), event.granted.stream_id))
                await asyncio.sleep(60)
        return seen

    first, second = run_virtual(day()), run_virtual(day())
    assert first == second
    assert first[-1][0] > 23 * 3600
    assert first[0][0] == pytest.approx(0.006)  # there and back


def test_deadline_is_exact_under_virtual_time() -> None:
    """A deadline passes at its very instant, on the virtual clock, on both sides."""

    async def main() -> tuple[float, float | None]:
        network = MemoryNetwork()
        loop = asyncio.get_running_loop()
        async with (
            echo_server(network) as (service, server),
            network.channel(server.address) as channel,
        ):
            async with call_server_stream(channel, GENERATE, ask("wait"), timeout_s=100) as stream:
                with pytest.raises(DeadlinePassed):
                    await stream.receive()
            at = loop.time()
            await service.ended.wait()
            return at, service.remaining_s

    assert run_virtual(main()) == (100.0, 100.0)


async def test_killed_host_breaks_its_connections() -> None:
    """A kill wakes everybody who waits for the host, and nobody can dial it afterwards."""
    network = MemoryNetwork(host="gateway")
    worker = network.at("decode-0")
    async with worker.serve(SERVER, EchoService().servicers), network.channel(SERVER) as channel:
        async with open_stream(channel, WORKER_SESSION) as stream:
            await stream.send(reserve(1))
            assert await stream.receive() is not None
            assert network.fabric.num_connections == 1

            async def receive() -> None:
                with pytest.raises(WorkerLost):
                    await stream.receive()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(receive())
                await asyncio.sleep(0)
                network.fabric.kill("decode-0")
        with pytest.raises(WorkerLost):
            await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
        assert network.fabric.num_connections == 0


async def test_killed_client_cancels_its_calls() -> None:
    """A server notices at once when a client's host is killed."""
    network = MemoryNetwork(host="decode-0")
    service = EchoService()
    gateway = network.at("gateway")
    async with (
        network.serve(SERVER, service.servicers),
        gateway.channel(SERVER) as channel,
        call_server_stream(channel, GENERATE, ask("wait")),
    ):
        await service.started.wait()
        assert service.peer is not None
        assert service.peer.host == "gateway"
        network.fabric.kill("gateway")
        await service.ended.wait()
    assert service.num_cancelled == 1


def test_partition_holds_bytes_until_it_heals() -> None:
    """Nobody is told of a partition; what was sent meanwhile arrives in order when it heals."""

    async def main() -> None:
        network = MemoryNetwork(host="gateway")
        fabric = network.fabric
        async with (
            network.at("decode-0").serve(SERVER, EchoService().servicers),
            network.channel(SERVER) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            await stream.send(reserve(1))
            assert await stream.receive() is not None
            fabric.partition("gateway", "decode-0")
            for number in range(2, 6):
                await stream.send(reserve(number))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000):
                    await stream.receive()
            fabric.heal()
            for number in range(2, 6):
                event = await stream.receive()
                assert event is not None
                assert event.granted is not None
                assert event.granted.stream_id == number

    run_virtual(main())


def test_one_way_hold_stops_one_direction() -> None:
    """With only the way back held, requests still arrive."""

    async def main() -> None:
        network = MemoryNetwork(host="gateway")
        service = EchoService()
        async with (
            network.at("decode-0").serve(SERVER, service.servicers),
            network.channel(SERVER) as channel,
        ):
            await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
            network.fabric.hold("decode-0", "gateway")
            with pytest.raises(DeadlinePassed):
                async with call_server_stream(channel, GENERATE, ask("x"), timeout_s=9) as stream:
                    await stream.receive()
            assert service.num_started == 1
            network.fabric.heal()

    run_virtual(main())


def test_dialling_across_a_partition_times_out() -> None:
    """A connection that cannot be made is a lost worker after the connect limit; it works again
    after the partition."""

    async def main() -> float:
        network = MemoryNetwork(host="gateway")
        async with network.at("decode-0").serve(SERVER, EchoService().servicers):
            network.fabric.partition("gateway", "decode-0")
            async with network.channel(SERVER) as channel:
                with pytest.raises(WorkerLost, match="no connection within"):
                    await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
                waited_s = asyncio.get_running_loop().time()
                network.fabric.heal()
                await call_unary(channel, TOKENIZE, wire.TokenizeRequest())
            return waited_s

    assert run_virtual(main()) == pytest.approx(5.0)


async def test_names_stand_for_hosts() -> None:
    """A name resolves to the hosts it was given, in order; a host without listeners to nothing."""
    network = MemoryNetwork()
    assert await network.resolve("gateway-0", 1) == []
    async with network.serve(Address("gateway-0", 8001), EchoService().servicers):
        assert await network.resolve("gateway-0", 8001) == [Address("gateway-0", 8001)]
        network.fabric.set_name("gateway", ["gateway-1", "gateway-0"])
        hosts = [address.host for address in await network.resolve("gateway", 8001)]
        assert hosts == ["gateway-0", "gateway-1"]


async def test_wildcard_host_is_the_networks_own() -> None:
    """Listening on 0.0.0.0 is listening on one's own host."""
    network = MemoryNetwork(host="prefill-3")
    async with network.serve(Address("0.0.0.0", 7), EchoService().servicers) as server:
        assert server.address == Address("prefill-3", 7)


def test_silence_for_ever_is_a_deadlock_that_names_its_waiters() -> None:
    """A program that can never go on raises instead of hanging, and says who waits."""

    async def main() -> None:
        network = MemoryNetwork()
        async with (
            echo_server(network) as (_, server),
            network.channel(server.address) as channel,
            call_server_stream(channel, GENERATE, ask("wait")) as stream,
        ):
            await stream.receive()

    with pytest.raises(Deadlock, match="waiting") as caught:
        run_virtual(main())
    assert "EchoService.generate" in str(caught.value)
    assert "ClientStream.receive" in str(caught.value)


def test_left_behind_tasks_fail_the_run() -> None:
    """A task that outlives the program is reported, not hidden."""
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        async def linger() -> None:
            await asyncio.sleep(1e6)

        kept.append(asyncio.get_running_loop().create_task(linger()))

    with pytest.raises(AssertionError, match="linger"):
        run_virtual(main())


async def test_mesh_errors_survive_a_reset_race() -> None:
    """A hundred failing calls at once all hear the typed error, never a broken stream."""
    network = MemoryNetwork()
    async with echo_server(network) as (_, server), network.channel(server.address) as channel:
        errors: list[str] = []

        async def one() -> None:
            try:
                async with call_server_stream(channel, GENERATE, ask("late:3")) as stream:
                    async for _ in stream:
                        pass
            except MeshError as error:
                errors.append(error.type)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(one())
    assert errors == ["no_blocks"] * 100
