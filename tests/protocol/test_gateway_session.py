"""A worker's end of a gateway's session: what is on its way, what waits, in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import wire
from shared.ids import Incarnation
from shared.rpc import codec
from shared.rpc.connection import ConnectionLimits
from shared.rpc.gateway_session import GatewaySession, GatewaySessions
from shared.rpc.memory import MemoryNetwork
from shared.rpc.methods import DECODE_SESSION
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from tests.support.echo_service import ANY_PORT, granted, reserve

WINDOW_BYTES = 65_535


class Host:
    """A worker that does nothing but keep its sessions."""

    def __init__(self) -> None:
        self.sessions: list[GatewaySession] = []
        self.num_commands = 0

    def session_opened(self, session: GatewaySession) -> None:
        self.sessions.append(session)

    def session_command(self, session: GatewaySession, command: Any) -> None:
        del session, command
        self.num_commands += 1

    def session_closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        del is_silent
        self.sessions.remove(session)


def hello(role: wire.Role) -> wire.Hello:
    return wire.Hello(
        protocol_version=codec.PROTOCOL_VERSION, role=role, incarnation=7, version="1"
    )


@pytest.mark.parametrize("kind", [TcpNetwork, MemoryNetwork])
async def test_an_event_is_on_its_way_when_send_returns(kind: Any) -> None:
    """No task is woken for it, so nothing that the loop has to do comes before it; what does not
    fit the gateway's window waits, counted, and keeps its place before all that follows."""
    host = Host()
    sessions = GatewaySessions(
        host,
        method=DECODE_SESSION,
        event_type=wire.DecodeEvent,
        role=wire.Role.DECODE,
        incarnation=Incarnation(9),
        version="1",
    )
    limits = ConnectionLimits(
        stream_window_bytes=WINDOW_BYTES, connection_window_bytes=70_000, keepalive_s=None
    )
    network = kind(limits=limits)
    async with (
        asyncio.timeout(20),
        network.serve(ANY_PORT, [sessions.servicer]) as server,
        network.channel(server.address) as channel,
        open_stream(channel, DECODE_SESSION) as stream,
    ):
        await stream.send(wire.DecodeCommand(hello=hello(wire.Role.GATEWAY)))
        assert (event := await stream.receive()) is not None
        assert event.hello is not None
        await stream.send(reserve(1))
        while not host.num_commands:
            await asyncio.sleep(0.001)
        (session,) = host.sessions
        for number in range(3):
            session.send(granted(number))
            assert session.outbox_bytes == 0
        large = wire.DecodeEvent(tokens=wire.StepTokens(token_ids=bytes(WINDOW_BYTES)))
        session.send(large, WINDOW_BYTES)
        session.send(granted(3))
        assert session.outbox_bytes > WINDOW_BYTES
        events = [await stream.receive() for _ in range(5)]
        await session.wait_drained()
        assert session.outbox_bytes == 0
        session.send(granted(4))
        assert session.outbox_bytes == 0
        events.append(await stream.receive())
        await stream.end()
    assert events == [granted(0), granted(1), granted(2), large, granted(3), granted(4)]
