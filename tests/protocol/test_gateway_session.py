"""A worker's end of a gateway's session: what is on its way, what waits, in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shared import wire
from shared.errors import MeshError, WorkerLost
from shared.home import Role
from shared.http2.connection import ConnectionLimits
from shared.ids import Incarnation
from shared.liveness import LivenessRule
from shared.messages import codec
from shared.messages.columns import pack_u32
from shared.request import SamplingParams
from shared.rpc.methods import WORKER_SESSION
from shared.rpc.stream import ClientStream, open_stream
from shared.rpc.tcp import TcpNetwork
from shared.transfer.orders import Order
from shared.worker.core.life import Task
from shared.worker.door import Door, GatewaySession
from tests.support.echo_service import ANY_PORT, granted
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_loop import virtual_time

WINDOW_BYTES = 65_535


class Host(Door):
    """A worker that does nothing but keep its sessions: ``until`` something has come of them."""

    def __init__(self, rule: LivenessRule) -> None:
        requests: Any = self
        super().__init__(requests, Role.DECODE, Incarnation(9), on_silent=lambda _: None, rule=rule)
        self.num_commands = 0

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def take(self, task: Task, order: Order, session: GatewaySession) -> Order:
        """What ``Requests`` does with an order."""
        del task, session
        self.num_commands += 1
        return order

    def cancel(self, request: Order, error: MeshError | None = None) -> None:
        """What ``Requests`` does with one that is taken back."""
        del request, error
        self.num_commands += 1


def reserve(stream_id: int) -> wire.WorkerCommand:
    """Return an order for the answer to a prompt of one token."""
    order = wire.WorkOrder(
        stream_id=stream_id,
        role=wire.Role.DECODE,
        peer_incarnation=5,
        request_id=b"r" * 16,
        lease_token=b"t" * 16,
        token_ids=pack_u32([1]),
        num_prompt_tokens=1,
        sampling=codec.sampling_to_wire(SamplingParams(max_tokens=4)),
        wait_s=1.0,
    )
    return wire.WorkerCommand(order=order)


PATIENT = LivenessRule(interval_s=5.0, suspect_after_s=10.0, dead_after_s=20.0)
"""In real time no heartbeat comes between the events of a test."""


async def shake_hands(stream: ClientStream[wire.WorkerCommand, wire.WorkerEvent]) -> None:
    """Say hello, as a gateway does, and wait until the worker's is here."""
    hello = wire.Hello(
        protocol_version=codec.PROTOCOL_VERSION,
        role=wire.Role.GATEWAY,
        incarnation=7,
    )
    await stream.send(wire.WorkerCommand(hello=hello))
    event = await stream.receive()
    assert event is not None
    assert event.hello is not None


@pytest.mark.parametrize("kind", [TcpNetwork, MemoryNetwork])
async def test_an_event_is_on_its_way_when_send_returns(kind: Any) -> None:
    """No task is woken for it, so nothing that the loop has to do comes before it; what does not
    fit the gateway's window waits, counted, and keeps its place before all that follows."""
    host = Host(PATIENT)
    limits = ConnectionLimits(
        stream_window_bytes=WINDOW_BYTES, connection_window_bytes=70_000, keepalive_s=None
    )
    network = kind(limits=limits)
    async with (
        asyncio.timeout(20),
        network.serve(ANY_PORT, [host.servicer]) as server,
        network.channel(server.address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        await shake_hands(stream)
        await stream.send(reserve(1))
        await host.until(lambda: host.num_commands)
        (session,) = host.sessions
        for number in range(3):
            session.send(granted(number))
            assert session._outbox_bytes == 0
        large = wire.WorkerEvent(tokens=wire.StepTokens(token_ids=bytes(WINDOW_BYTES)))
        session.send(large, WINDOW_BYTES)
        session.send(granted(3))
        assert session._outbox_bytes > WINDOW_BYTES
        events = [await stream.receive() for _ in range(5)]
        await session.drained.wait()
        assert session._outbox_bytes == 0
        session.send(granted(4))
        assert session._outbox_bytes == 0
        events.append(await stream.receive())
    assert events == [granted(0), granted(1), granted(2), large, granted(3), granted(4)]


async def test_the_last_order_that_the_host_has_heard_of_is_told() -> None:
    """What a report counts of this gateway's orders; a cancel is none, another gateway has its
    own, and a session that has ended has seen nothing."""
    host = Host(PATIENT)
    network = MemoryNetwork()
    async with network.serve(ANY_PORT, [host.servicer]) as server:
        assert host.seen(Incarnation(1)) == 0
        async with (
            network.channel(server.address) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            await shake_hands(stream)
            (session,) = host.sessions
            gateway = session.gateway
            cancel = wire.WorkerCommand(cancel=wire.CancelOrder(stream_id=8))
            for command, seen in ((reserve(3), 3), (reserve(8), 8), (cancel, 8)):
                num_before = host.num_commands
                await stream.send(command)
                await host.until(lambda: host.num_commands > num_before)  # noqa: B023
                assert host.seen(gateway) == seen
            assert host.seen(Incarnation(int(gateway) + 1)) == 0
        await host.until(lambda: not host.sessions)
        assert host.seen(gateway) == 0


@virtual_time
async def test_heartbeats_and_what_comes_after_the_end_wait_for_nobody() -> None:
    """Only events are counted; after the end nothing is, so that nobody waits for it."""
    host = Host(PATIENT)
    network = MemoryNetwork()
    async with network.serve(ANY_PORT, [host.servicer]) as server:
        async with (
            network.channel(server.address) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            await shake_hands(stream)
            (session,) = host.sessions
            for _ in range(3):
                beat = await stream.receive()
                assert beat is not None
                assert beat.heartbeat is not None
                assert session._outbox_bytes == 0
            session.close(WorkerLost("the test is over"))
            session.send(granted(1))
            assert session._outbox_bytes == 0
            await session.drained.wait()
        await host.until(lambda: not host.sessions)
