"""How workers join: every address behind every name, and again after every loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from shared import wire
from shared.address import Address, parse_address
from shared.errors import IncompatiblePeer, InvalidRequest, Overloaded
from shared.home import Role
from shared.ids import Incarnation, MeshPeer, StreamId
from shared.kv.journal import Journal
from shared.membership.join import (
    RETURNS_S,
    Announcement,
    Registration,
    advertised,
)
from shared.worker_status import WorkerStatus
from tests.support.fake_gateway import FakeGateway, fake_gateway
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import MODEL

PORT = 8001
WORKER = Incarnation(77)


class Client:
    """A registration with everything it says."""

    def __init__(self, network: MemoryNetwork, names: Sequence[str], *, is_prefill: bool) -> None:
        self.load = WorkerStatus()
        self.peers: list[Sequence[MeshPeer]] = []
        self.num_drains = 0
        self.changed = asyncio.Event()
        self.registration = Registration(
            network=network,
            gateways=[Address(name, PORT) for name in names],
            announcement=Announcement(
                role=Role.PREFILL if is_prefill else Role.DECODE,
                incarnation=WORKER,
                spec=MODEL.spec,
                layout=MODEL.layout,
                address=Address("worker", 9000),
                num_blocks=64,
                block_size=16,
            ),
            load=lambda: self.load,
            journal=Journal(16),
            on_peers=self.peers.append,
            on_drain=self._drain,
            on_change=self._change,
        )

    def _drain(self) -> None:
        self.num_drains += 1

    def _change(self) -> None:
        self.changed.set()

    async def joined(self, count: int) -> None:
        """Wait until so many gateways know us."""
        while self.registration.num_joined != count:
            self.changed.clear()
            await self.changed.wait()


class World:
    """Gateways on hosts of their own; the worker under test on ``worker``."""

    def __init__(self, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        self.network = MemoryNetwork(host="worker")
        self._stack = stack
        self._tasks = tasks
        self._next = 0xA0
        self.error: BaseException | None = None

    async def gateway(self, host: str, *, incarnation: int = 0) -> FakeGateway:
        self._next += 1
        return await self._stack.enter_async_context(
            fake_gateway(
                self.network.at(host),
                Address(host, PORT),
                incarnation=incarnation or self._next,
                dials=False,
            )
        )

    def client(self, *names: str, is_prefill: bool = True) -> Client:
        client = Client(self.network, names, is_prefill=is_prefill)
        self.task = self._tasks.create_task(self._run(client))
        return client

    async def _run(self, client: Client) -> None:
        try:
            await client.registration.run()
        except IncompatiblePeer as error:
            self.error = error


async def in_world(body: Any) -> None:
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        world = World(stack, tasks)
        await body(world)
        world.task.cancel()
        await asyncio.wait([world.task])


@virtual_time
async def test_every_address_behind_every_name_is_joined() -> None:
    """Two hosts behind one name and one behind another make three gateways."""

    async def body(world: World) -> None:
        gateways = [await world.gateway(host) for host in ("g1", "g2", "g3")]
        world.network.fabric.set_name("both", ["g1", "g2"])
        client = world.client("both", "g3")
        await client.joined(3)
        assert all(WORKER in gateway.workers for gateway in gateways)
        assert client.registration.not_ready_reason == ""

    await in_world(body)


@virtual_time
async def test_a_gateway_that_appears_later_is_found_without_a_restart() -> None:
    """Names are resolved again every few seconds."""

    async def body(world: World) -> None:
        await world.gateway("g1")
        world.network.fabric.set_name("gateway", ["g1"])
        client = world.client("gateway")
        await client.joined(1)
        await world.gateway("g2")
        world.network.fabric.set_name("gateway", ["g1", "g2"])
        began_at = asyncio.get_running_loop().time()
        await client.joined(2)
        assert asyncio.get_running_loop().time() - began_at < 6

    await in_world(body)


@virtual_time
async def test_a_lost_gateway_is_joined_again_and_names_the_partners_anew() -> None:
    """While it is away nobody is a standing partner, which closes no pair (``core/pairs.py``)."""

    async def body(world: World) -> None:
        first = await world.gateway("g1")
        client = world.client("g1")
        await client.joined(1)
        peer = await add_decode(first, 5)
        await until(lambda: client.peers == [(peer,)], first)
        world.network.fabric.kill("g1")
        await client.joined(0)
        assert "g1" in client.registration.not_ready_reason
        assert client.peers == [(peer,), ()]
        second = await world.gateway("g1")
        await client.joined(1)
        await add_decode(second, 5)
        await until(lambda: client.peers == [(peer,), (), (peer,)], second)

    await in_world(body)


@virtual_time
async def test_of_a_gateway_that_is_gone_for_good_nothing_is_kept() -> None:
    """Each that starts anew may have another address: a worker outlives thousands of them."""

    async def body(world: World) -> None:
        client = world.client("gateway")
        for host in ("g1", "g2"):
            gateway = await world.gateway(host)
            world.network.fabric.set_name("gateway", [host])
            await client.joined(1)
            peer = await add_decode(gateway, 5)
            await until(lambda: client.peers[-1:] == [(peer,)], gateway)  # noqa: B023
            world.network.fabric.kill(host)
            await client.joined(0)
        await world.gateway("g3")
        world.network.fabric.set_name("gateway", ["g3"])
        await client.joined(1)
        kept = [it for it in vars(client.registration).values() if isinstance(it, dict)]
        assert not any(Address(host, PORT) in it for it in kept for host in ("g1", "g2"))

    await in_world(body)


@virtual_time
async def test_a_gateway_that_restarts_is_joined_at_once() -> None:
    """Its clients wait for its workers: those look for it often, though its name is gone, too."""

    async def body(world: World) -> None:
        await world.gateway("g1")
        client = world.client("g1")
        await client.joined(1)
        world.network.fabric.kill("g1")
        await client.joined(0)
        await asyncio.sleep(1.7)
        await world.gateway("g1")
        began_at = asyncio.get_running_loop().time()
        await client.joined(1)
        assert asyncio.get_running_loop().time() - began_at <= RETURNS_S

    await in_world(body)


@virtual_time
async def test_peer_lists_of_several_gateways_are_merged() -> None:
    """A decode worker counts once, whoever names it."""

    async def body(world: World) -> None:
        one, two = await world.gateway("g1"), await world.gateway("g2")
        client = world.client("g1", "g2")
        await client.joined(2)
        a = await add_decode(one, 5)
        await add_decode(two, 5)
        b = await add_decode(two, 6)
        await until(lambda: bool(client.peers) and set(client.peers[-1]) == {a, b}, two)
        await until(lambda: len(client.peers[-1]) == 2, one)

    await in_world(body)


@virtual_time
async def test_a_first_refusal_is_final_and_says_why() -> None:
    """A worker with another model must not wait for ever."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        gateway.refusal = IncompatiblePeer("this mesh serves another model")
        world.client("g1")
        await asyncio.wait([world.task])
        assert isinstance(world.error, IncompatiblePeer)
        assert "another model" in world.error.message

    await in_world(body)


@virtual_time
async def test_the_other_address_of_localhost_is_not_waited_for() -> None:
    """The gateway listens on one of them. A host elsewhere may come yet."""

    async def body(world: World) -> None:
        gateway = await world.gateway("127.0.0.1")
        gateway.refusal = IncompatiblePeer("this mesh serves another model")
        world.network.fabric.set_name("gateways", ["127.0.0.1", "10.0.0.5"])
        world.network.fabric.set_name("localhost", ["::1", "127.0.0.1"])
        world.client("gateways")
        await asyncio.wait([world.task], timeout=60.0)
        assert not world.task.done()
        world.task.cancel()
        world.client("localhost")
        await asyncio.wait([world.task], timeout=60.0)
        assert "another model" in str(world.error)

    await in_world(body)


@virtual_time
async def test_who_refuses_first_does_not_speak_for_a_gateway_beside_it() -> None:
    """Two meshes on one machine, and the connection to the second is not made yet."""

    async def body(world: World) -> None:
        gateway = await world.gateway("127.0.0.1")
        gateway.refusal = IncompatiblePeer("this mesh serves another model")
        await world.gateway("127.0.0.2")
        world.network.fabric.hold("worker", "127.0.0.2")
        client = world.client("127.0.0.1", "127.0.0.2")
        await asyncio.sleep(0.05)
        world.network.fabric.release("worker", "127.0.0.2")
        await client.joined(1)

    await in_world(body)


@virtual_time
async def test_a_refusal_after_membership_is_not_the_end() -> None:
    """A restarted gateway that met a stranger first must not take the whole mesh down."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        client = world.client("g1")
        await client.joined(1)
        gateway.refusal = IncompatiblePeer("a stranger came first")
        client.registration.rejoin(gateway.incarnation)
        await client.joined(0)
        num_joins = gateway.num_joins
        await until(lambda: gateway.num_joins > num_joins + 2, gateway)
        gateway.refusal = None
        await client.joined(1)

    await in_world(body)


@virtual_time
async def test_a_passing_refusal_is_tried_again() -> None:
    """Only "incompatible" is final."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        gateway.refusal = Overloaded("too many workers")
        client = world.client("g1")
        await until(lambda: gateway.num_joins > 1, gateway)
        gateway.refusal = None
        await client.joined(1)

    await in_world(body)


@virtual_time
async def test_status_comes_as_often_as_there_is_news_and_every_two_seconds() -> None:
    """A burst of changes makes one status; what nobody was told has changed is in the next one,
    half a second later."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        client = world.client("g1")
        loop = asyncio.get_running_loop()
        await client.joined(1)
        counts: list[float] = []
        for _ in range(3):
            before = gateway.num_statuses
            await until(lambda: gateway.num_statuses > before, gateway)  # noqa: B023
            counts.append(loop.time())
        assert counts[2] - counts[1] == pytest.approx(2.0, abs=0.01)
        client.load = WorkerStatus(num_running=1)
        before = gateway.num_statuses
        await until(lambda: gateway.num_statuses > before, gateway)
        assert loop.time() - counts[2] == pytest.approx(0.5, abs=0.01)
        before, changed_at = gateway.num_statuses, loop.time()
        client.load = WorkerStatus(
            num_running=3, pending_tokens=100, is_draining=True, paired=frozenset({Incarnation(9)})
        )
        for _ in range(50):
            client.registration.report_soon()
        await until(lambda: gateway.num_statuses > before, gateway)
        assert loop.time() - changed_at < 0.1
        assert gateway.num_statuses == before + 1
        status = gateway.status[WORKER]
        assert (status.num_running, status.pending_tokens, status.draining) == (3, 100, True)

    await in_world(body)


@virtual_time
async def test_news_is_gathered_for_as_long_as_the_gateway_says() -> None:
    """A gateway of many workers hears of a change later, and another of the same worker at once;
    a pace that would hide news is refused."""

    async def body(world: World) -> None:
        large, small = await world.gateway("g1"), await world.gateway("g2")
        large.gather_s = 0.4
        client = world.client("g1", "g2")
        loop = asyncio.get_running_loop()
        await client.joined(2)
        await asyncio.sleep(0.02)
        client.load, changed_at = WorkerStatus(num_running=3), loop.time()
        client.registration.report_soon()
        for gateway, gathered_s in ((small, 0.05), (large, 0.4)):
            await until(lambda: gateway.status[WORKER].num_running == 3, gateway)  # noqa: B023
            assert loop.time() - changed_at == pytest.approx(gathered_s, abs=0.02)
        large.gather_s = 0.6
        client.registration.rejoin(large.incarnation)
        await client.joined(1)
        assert client.registration.num_joined == 1

    await in_world(body)


@virtual_time
async def test_who_joins_anew_gathers_news_as_its_new_session_says() -> None:
    """A gateway that has restarted has few workers at first, and says nothing of its pace."""

    async def body(world: World) -> None:
        gateway, loop = await world.gateway("g1"), asyncio.get_running_loop()
        gateway.gather_s = 0.4
        client = world.client("g1")
        await client.joined(1)
        await asyncio.sleep(1.0)
        gateway.gather_s = None
        client.registration.rejoin(gateway.incarnation)
        await until(lambda: gateway.num_joins == 2, gateway)
        await asyncio.sleep(0.02)
        client.load, changed_at = WorkerStatus(num_running=3), loop.time()
        client.registration.report_soon()
        await until(lambda: gateway.status[WORKER].num_running == 3, gateway)
        assert loop.time() - changed_at == pytest.approx(0.05, abs=0.02)

    await in_world(body)


@virtual_time
async def test_every_gateway_hears_how_many_there_are() -> None:
    """Each may give the worker its share."""

    async def body(world: World) -> None:
        first, second = await world.gateway("g1"), await world.gateway("g2")
        client = world.client("g1", "g2")
        for gateway in (first, second):
            await until(
                lambda: WORKER in gateway.status and gateway.status[WORKER].num_gateways == 2,  # noqa: B023
                gateway,
            )
        second.refusal = IncompatiblePeer("another mesh")
        client.registration.rejoin(second.incarnation)
        await until(lambda: first.status[WORKER].num_gateways == 1, first)

    await in_world(body)


@virtual_time
async def test_roles_home_and_seen_orders_travel_with_announcement_and_status() -> None:
    """A worker that serves both says so once, and with each status what it holds, where it is at
    home, and what of that gateway's orders it counts."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1", incarnation=0xA1)
        client = world.client("g1")
        registration = client.registration
        registration._announcement = replace(
            registration._announcement, serves=(Role.PREFILL, Role.DECODE)
        )
        client.load = WorkerStatus(num_prompts=2, num_answers=3, home=Role.DECODE, home_epoch=4)
        seen = {0xA1: StreamId(8)}
        registration._seen = lambda gateway: seen.get(gateway, StreamId(0))
        await until(lambda: WORKER in gateway.status, gateway)
        assert gateway.workers[WORKER].serves == [wire.Role.PREFILL, wire.Role.DECODE]
        status = gateway.status[WORKER]
        assert (status.num_prompts, status.num_answers, status.home_epoch) == (2, 3, 4)
        assert status.home == wire.Role.DECODE
        assert status.seen_id == 8

    await in_world(body)


@virtual_time
async def test_a_gateway_that_never_says_hello_is_tried_again() -> None:
    """A listening socket is not a gateway: three seconds, then the next try."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        world.network.fabric.hold("g1", "worker")
        client = world.client("g1")
        await asyncio.sleep(20)
        assert client.registration.num_joined == 0
        world.network.fabric.release("g1", "worker")
        await client.joined(1)
        assert WORKER in gateway.workers

    await in_world(body)


@virtual_time
async def test_a_drain_directive_reaches_the_worker() -> None:
    """It comes on the join stream."""

    async def body(world: World) -> None:
        gateway = await world.gateway("g1")
        client = world.client("g1")
        await client.joined(1)
        gateway.drain.set()
        await until(lambda: client.num_drains == 1, gateway)

    await in_world(body)


def test_what_a_worker_advertises() -> None:
    """Nothing, a host, or a host with the port that others see."""
    listening = Address("0.0.0.0", 9000)
    assert advertised("", listening) == Address("", 9000)
    assert advertised("node-7", listening) == Address("node-7", 9000)
    assert advertised("node-7:31000", listening) == Address("node-7", 31000)
    assert advertised("[fd00::7]:31000", listening) == Address("fd00::7", 31000)
    # Kubernetes' status.podIP has no brackets.
    for bare in ("fd00::7", "[fd00::7]", "::ffff:10.0.0.7", "fe80::7%eth0"):
        assert advertised(bare, listening) == Address(bare.strip("[]"), 9000)
    for wrong in ("", " ", ":9000", "node-7:", "node-7:²", "node-7:70000"):
        with pytest.raises(InvalidRequest, match="--gateway must be host:port"):
            parse_address(wrong, param="gateway", default_port=9000)


async def add_decode(gateway: FakeGateway, incarnation: int) -> MeshPeer:
    """Let a decode worker be a member of the fake gateway."""
    host, port = f"decode-{incarnation}", 9000
    hello = wire.Hello(role=wire.Role.DECODE, incarnation=incarnation)
    announce = wire.WorkerAnnounce(hello=hello, host=host, port=port)
    gateway.workers[Incarnation(incarnation)] = announce
    await gateway.notify()
    return MeshPeer(Incarnation(incarnation), Address(host, port))


async def until(condition: Any, gateway: FakeGateway) -> None:
    """Wait, looking whenever the gateway heard something: statuses come twice a second."""
    await gateway.until(condition)
