"""Connections over real sockets, on the loop that services run on."""

from __future__ import annotations

import asyncio

import pytest

from shared.address import Address
from shared.http2.connection import ConnectionLimits
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
