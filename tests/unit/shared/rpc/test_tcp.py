"""Connections over real sockets, on the loop that services run on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from typing import Any

import pytest

from shared.address import Address, host_of
from shared.errors import WorkerLost
from shared.http2.connection import ConnectionLimits
from shared.listening import listen_at
from shared.rpc.methods import MESH_PROVE
from shared.rpc.stream import open_stream
from shared.rpc.tcp import GuardedChannel, TcpNetwork, closing


def test_a_call_that_is_given_up_amid_its_connection_leaves_nothing_behind() -> None:
    """Whatever the moment: a connection that was made is closed to the end, or its pings would
    find it closed, seconds later, and be logged as a bug."""
    uvloop = pytest.importorskip("uvloop")
    num_given_up = 0

    async def dial(address: Address, turns: int) -> None:
        nonlocal num_given_up
        async with closing(GuardedChannel(address, ConnectionLimits())) as channel:
            async with asyncio.TaskGroup() as tasks:
                dialling = tasks.create_task(channel.__connect__())
                for _ in range(turns):
                    await asyncio.sleep(0)
                dialling.cancel()
            if channel.current is None and hasattr(channel._dialled, "connection"):
                num_given_up += 1
                assert channel._dialled.closed.is_set()

    async def main() -> None:
        async with TcpNetwork().serve(Address("127.0.0.1", 0), []) as server:
            for turns in range(12):
                await dial(server.address, turns)

    uvloop.run(main())
    assert num_given_up


async def test_a_connection_that_the_system_gives_up_is_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its word is a TimeoutError, too, and nobody's deadline has passed: another pair may serve."""

    async def gives_up(_: GuardedChannel) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(GuardedChannel, "_create_connection", gives_up)
    async with closing(GuardedChannel(Address("127.0.0.1", 1), ConnectionLimits())) as channel:
        with pytest.raises(WorkerLost, match="Connection timed out"):
            async with open_stream(channel, MESH_PROVE):
                pass


async def test_a_name_is_listened_at_where_this_machine_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``localhost`` is ::1, too, also where IPv6 is off; of a name with nothing here is told."""

    def found(*hosts: str) -> Any:
        return lambda _host, port, *_: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts
        ]

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    elsewhere = "192.0.2.1"
    monkeypatch.setattr(socket, "getaddrinfo", found(elsewhere, "127.0.0.1"))
    for wanted in (0, port):
        server = await listen_at(asyncio.Protocol, "a", wanted)
        assert [it.getsockname()[0] for it in server.sockets] == ["127.0.0.1"]
        server.close()
    monkeypatch.setattr(socket, "getaddrinfo", found(elsewhere))
    with pytest.raises(OSError, match=f"cannot listen on a:{port}: .*{elsewhere}") as told:
        await listen_at(asyncio.Protocol, "a", port)
    assert told.value.errno == errno.EADDRNOTAVAIL


def test_connections_wait_for_a_loop_that_is_busy() -> None:
    """As many as may come in two seconds of 1,000 each: not one is turned away."""
    count = 2_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192), hard))

    async def main() -> None:
        server = await listen_at(asyncio.Protocol, "127.0.0.1", 0)
        with contextlib.ExitStack() as to_close:
            to_close.callback(server.close)
            for _ in range(count):  # the loop takes none of them meanwhile
                client = socket.create_connection(server.sockets[0].getsockname(), timeout=0.5)
                to_close.enter_context(client)

    try:
        pytest.importorskip("uvloop").run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_local_address_keeps_its_zone() -> None:
    """Also on the loop of services, whose lookups forget it: without it nobody is reached."""
    uvloop = pytest.importorskip("uvloop")
    zone = socket.if_nameindex()[0]

    async def main() -> None:
        named = f"fe80::1%{zone[1]}"
        assert await TcpNetwork().resolve(named, 8200) == [Address(named, 8200)]
        assert host_of(("fe80::1", 8200, 0, zone[0])) == named
        assert host_of(("fe80::1", 8200, 0, 0)) == "fe80::1"

    uvloop.run(main())
