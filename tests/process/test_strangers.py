"""Whoever does not know the mesh's secret gets nothing from it and changes nothing in it, whatever
door of whatever process they come to: each way of trying, against real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpclib.const import Status

from services.gateway.front.auth import hash_key
from shared import wire
from shared.address import Address
from shared.errors import IncompatiblePeer, MeshError, NotOfThisMesh
from shared.ids import Incarnation
from shared.membership.mesh_network import MeshNetwork
from shared.mesh_secret import MeshSecret, new_secret
from shared.messages import codec
from shared.messages.columns import pack_u32
from shared.rpc.methods import (
    MESH_PROVE,
    REGISTRY_JOIN,
    TRANSFER_PAIR,
    WORKER_SESSION,
    Method,
)
from shared.rpc.network import Network
from shared.rpc.service import Servicer, bind
from shared.rpc.stream import open_stream
from shared.rpc.tcp import TcpNetwork
from shared.runtime.service import EXIT_FAILED
from tests.support.fuzz import a_fuzzed_call
from tests.support.process_mesh import (
    ROLES,
    Answer,
    ProcessMesh,
    a_prompt,
    fake_ids,
    fake_model,
    process_mesh,
)
from tests.support.raw_http2 import raw_client
from tests.support.service_process import ServiceProcess, free_port

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

ODD = "tests.support.odd_worker"
ANSWERS_WITHIN_S = 30.0
FUZZED_CALLS = 200
OUR_BUGS = {str(status.value) for status in (Status.INTERNAL, Status.UNKNOWN)}


@dataclass
class Target:
    """A mesh with a secret, and what it must be like after every attack."""

    mesh: ProcessMesh
    gateway: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess

    def door(self, name: str) -> Address:
        """``gateway`` (where workers join), ``clients``, ``prefill`` or ``decode``."""
        if name in ROLES:
            return _local(getattr(self, name).facts["grpc_port"])
        return _local(self.gateway.facts["mesh_port" if name == "gateway" else "grpc_port"])

    async def require_unharmed(self) -> None:
        """The same three processes, nobody beside them, answer exactly and hold nothing."""
        prompt = a_prompt(100, start=random.randrange(1000))
        ids, _ = await self.mesh.ask_grpc(self.gateway, prompt, 20)
        assert ids == fake_ids(prompt, 20)
        gauges = await self.mesh.gauges(self.gateway)
        assert [gauges[f"workers:{role}"] for role in ROLES] == [1, 1]
        await self.mesh.home([self.gateway], [self.prefill, self.decode])


def _local(port: int) -> Address:
    return Address("127.0.0.1", port)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[Target]:
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [await mesh.start(role) for role in ROLES]
            await mesh.ready(*workers)
            await mesh.paired(gateway, 1)
            yield Target(mesh, gateway, *workers)


@pytest_asyncio.fixture(loop_scope="module")
async def target(started: Target) -> AsyncIterator[Target]:
    with started.mesh.explained():
        yield started
        await started.require_unharmed()


def hello(role: wire.Role) -> wire.Hello:
    return wire.Hello(
        protocol_version=codec.PROTOCOL_VERSION, role=role, incarnation=0xBAD, version="stranger"
    )


def announcement(port: int) -> wire.WorkerReport:
    """What a decode worker of this mesh would say."""
    model = fake_model()
    return wire.WorkerReport(
        announce=wire.WorkerAnnounce(
            hello=hello(wire.Role.DECODE),
            model=codec.model_to_wire(model.spec),
            layout=codec.layout_to_wire(model.layout),
            host="127.0.0.1",
            port=port,
            num_blocks=1000,
            block_size=16,
        )
    )


FIRST_WORDS: list[tuple[str, Method[Any, Any], Any]] = [
    ("gateway", REGISTRY_JOIN, announcement(9)),
    ("prefill", WORKER_SESSION, wire.WorkerCommand(hello=hello(wire.Role.GATEWAY))),
    ("decode", WORKER_SESSION, wire.WorkerCommand(hello=hello(wire.Role.GATEWAY))),
    ("decode", TRANSFER_PAIR, wire.PairMessage(hello=wire.PairHello(
        hello=hello(wire.Role.PREFILL),
        model=codec.model_to_wire(fake_model().spec),
        layout=codec.layout_to_wire(fake_model().layout),
        transport_address=bytes(64),
    ))),
]  # fmt: skip
"""Door, method, and what an honest caller says first."""


async def call(network: Network, address: Address, method: Method[Any, Any], words: Any) -> Any:
    """Say the first words of a method; its first answer. Raises MeshError."""
    async with (
        asyncio.timeout(ANSWERS_WITHIN_S),
        network.channel(address) as channel,
        open_stream(channel, method) as stream,
    ):
        await stream.send(words)
        return await stream.receive()


def within(secret: str, role: str = "gateway") -> Network:
    """The network of a process that has a secret."""
    return MeshNetwork(
        TcpNetwork(),
        MeshSecret(secret),
        random.randbytes,
        role=role,
        incarnation=Incarnation(0xBAD),
    )


@pytest.mark.parametrize(("door", "method", "words"), FIRST_WORDS, ids=lambda it: str(it)[:30])
async def test_a_stranger_can_neither_join_nor_give_orders(
    target: Target, door: str, method: Method[Any, Any], words: Any
) -> None:
    """Without a proof, and with another secret: to join and get prompts, to have a worker compute,
    to push KV. Who does know the secret is answered."""
    with pytest.raises(NotOfThisMesh, match="has not proven"):
        await call(TcpNetwork(), target.door(door), method, words)
    wrong = within(new_secret(random.randbytes))
    with pytest.raises(NotOfThisMesh, match="different mesh secrets"):
        await call(wrong, target.door(door), method, words)
    right = within(target.mesh.secret)
    if method is not TRANSFER_PAIR:  # which goes on with UCX
        assert await call(right, target.door(door), method, words) is not None

        async def has_left() -> bool:
            gauges = await target.mesh.gauges(target.gateway)
            return gauges["workers:decode"] == 1

        await target.mesh.until(has_left)


@pytest.mark.parametrize("method", [REGISTRY_JOIN, MESH_PROVE, WORKER_SESSION])
async def test_the_clients_door_knows_no_workers(target: Target, method: Method[Any, Any]) -> None:
    """What only workers and gateways say to each other is not served where clients come."""
    words = announcement(9) if method is REGISTRY_JOIN else method.request_type()
    with pytest.raises(IncompatiblePeer) as refusal:
        await call(TcpNetwork(), target.door("clients"), method, words)
    assert refusal.value.code == "unimplemented"


@pytest.mark.parametrize("door", ["gateway", "prefill", "decode"])
async def test_fuzzed_proofs_are_refused(target: Target, door: str) -> None:
    """The one method that strangers may call: it ends with a status that is not our bug."""
    source = random.Random(door)
    honest = [
        [wire.Proof(hello=hello(wire.Role.GATEWAY), nonce=bytes(32)), wire.Proof(proof=bytes(32))]
    ]
    seen: set[str] = set()
    async with asyncio.timeout(ANSWERS_WITHIN_S), raw_client(target.door(door)) as client:
        for _ in range(FUZZED_CALLS):
            data = a_fuzzed_call(source, honest)
            found = await client.call(client.headers(MESH_PROVE.path), data)
            seen.add(found.get("grpc-status", "none"))
    assert str(Status.UNAUTHENTICATED.value) in seen
    assert str(Status.INVALID_ARGUMENT.value) in seen
    assert not seen & {"none", *OUR_BUGS}


async def test_a_mute_stranger_is_let_go(target: Target) -> None:
    """A proof that is begun and not finished ends in time."""
    async with (
        asyncio.timeout(ANSWERS_WITHIN_S),
        TcpNetwork().channel(target.door("decode")) as channel,
        open_stream(channel, MESH_PROVE) as stream,
    ):
        await stream.send(wire.Proof(hello=hello(wire.Role.GATEWAY), nonce=bytes(32)))
        assert await stream.receive() is not None
        with pytest.raises(MeshError):
            await stream.receive()


# --- what was said before, and by whom ----------------------------------------------------------


@contextlib.asynccontextmanager
async def a_wire_tap(to: Address) -> AsyncIterator[tuple[Address, list[bytearray]]]:
    """Carry connections to an address and keep what the callers said, one record each."""
    said: list[bytearray] = []

    async def carry(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, record: bytearray
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                record += data
                sink.write(data)
                await sink.drain()
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(to.host, to.port)
        said.append(bytearray())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(carry(reader, far_writer, said[-1]))
            tasks.create_task(carry(far_reader, writer, bytearray()))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    with contextlib.closing(server):  # who is connected stays: Python 3.12 would wait for them
        host, port = server.sockets[0].getsockname()
        yield Address(host, port), said


async def test_a_join_that_was_overheard_cannot_be_repeated() -> None:
    """Every byte that a worker said on its way in, said again by somebody else, joins nobody."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            async with a_wire_tap(_local(gateway.facts["mesh_port"])) as (tap, said):
                worker = await mesh.add("prefill", gateway=tap)
                await mesh.usable(gateway, 1)
                await worker.end_at_once()
            await mesh.usable(gateway, 0)
            (overheard,) = said
            assert len(overheard) > 300
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.facts["mesh_port"])
            writer.write(overheard)
            line = json.loads(await gateway.said("a stranger was refused"))
            assert line["code"] in ("other_secret", "no_proof")
            assert (await mesh.gauges(gateway))["workers:prefill"] == 0
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            await reader.read()
            # The same process, on its own feet, is welcome.
            await mesh.add("prefill")
            await mesh.usable(gateway, 1)


async def test_no_acknowledgement_is_taken_from_who_took_decodes_address() -> None:
    """Prefill and the gateway both dial it, for decode has joined as the one who is there; it would
    grant and acknowledge whatever comes, but has no proof, and hears not one command."""
    heard: list[str] = []
    has_been_dialled = asyncio.Event()

    def hears(method: Method[Any, Any], answer: Callable[[Any], Any]) -> Servicer:
        async def serve(stream: Any) -> None:
            heard.append(method.path)
            while (message := await stream.receive()) is not None:
                await stream.send(answer(message))
            has_been_dialled.set()

        return Servicer(bind(method, serve))

    servicers = [
        hears(MESH_PROVE, lambda it: wire.Proof(hello=hello(wire.Role.DECODE), nonce=it.nonce)),
        hears(TRANSFER_PAIR, lambda _: wire.PairMessage(ack=wire.TransferAck(done=True))),
        hears(WORKER_SESSION, lambda _: wire.WorkerEvent(hello=hello(wire.Role.DECODE))),
    ]
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill = await mesh.add("prefill")
            address = _local(free_port())
            async with TcpNetwork().serve(address, servicers):
                decode = await mesh.add("decode", advertise=address)
                async with asyncio.timeout(ANSWERS_WITHIN_S):
                    await has_been_dialled.wait()
                await prefill.said("different mesh secrets.*pair lost")
                await decode.end_at_once()
            assert {*heard} == {MESH_PROVE.path}
            await mesh.add("decode")
            await mesh.paired(gateway, 1)
            ids, _ = await mesh.ask_grpc(gateway, a_prompt(50), 9)
            assert ids == fake_ids(a_prompt(50), 9)


async def test_no_tenant_and_no_salt_stands_in_what_a_worker_is_told(tmp_path: Path) -> None:
    """Nor the key: every byte that the gateway says to its workers is looked at. One tenant finds
    its own prompt in the cache again, another one does not."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('alice', 'key-of-a', 'tenant-a')}\n{hash_key('bobby', 'key-of-b')}")
    async with process_mesh() as mesh, contextlib.AsyncExitStack() as taps:
        with mesh.explained():
            gateway = await mesh.start_gateway(api_keys=keys)
            heard: list[list[bytearray]] = []
            for role in ROLES:
                port = free_port()
                tap, said = await taps.enter_async_context(a_wire_tap(_local(port)))
                heard.append(said)
                await mesh.add(role, port=port, advertise=tap)
            prompt = a_prompt(64)

            async def ask(key: str, **fields: Any) -> int:
                headers = {"Authorization": f"Bearer {key}"}

                async def is_served() -> bool:
                    nonlocal answer
                    answer = await mesh.ask(gateway, prompt, 4, headers=headers, **fields)
                    return answer.status == 200

                answer = Answer()
                await mesh.until(is_served)
                answer.require_whole(4)
                return answer.receipt["cached_tokens"]

            assert await ask("key-of-a", cache_salt="salty") == 0
            assert await ask("key-of-a", cache_salt="salty") > 0
            assert await ask("key-of-a") == 0
            assert await ask("key-of-b") == 0
            for said in heard:
                told = b"".join(said)
                assert pack_u32(prompt) in told
                for word in (b"alice", b"bobby", b"tenant-a", b"key-of-", b"salty"):
                    assert word not in told


# --- meshes, secrets and releases that do not fit -------------------------------------------------


async def require_refused(process: ServiceProcess, *words: str) -> None:
    """It ended, with one line for people."""
    assert await process.ended() == EXIT_FAILED, process.log
    (line,) = [line for line in process.log if '"level":"error"' in line]
    assert all(word in json.loads(line)["error"] for word in words), line


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (new_secret(random.randbytes), ("different mesh secrets", "--mesh-secret-file")),
        ("", ("has not proven", "--mesh-secret-file")),
    ],
    ids=["wrong", "missing"],
)
async def test_a_worker_with_a_wrong_or_no_secret_is_told_and_ends(
    target: Target, secret: str, words: tuple[str, ...]
) -> None:
    """The sentence names the remedy; the gateway and its workers go on."""
    for role in ROLES:
        await require_refused(await target.mesh.start(role, mesh_secret=secret), *words)


async def test_two_meshes_on_one_host_and_a_gateway_with_the_wrong_secret() -> None:
    """A worker that names a gateway of each mesh serves its own, and the other one, which may not
    give it orders either, is none the wiser."""
    async with process_mesh() as ours, process_mesh() as theirs:
        with ours.explained(), theirs.explained():
            gateways = [await mesh.start_gateway() for mesh in (ours, theirs)]
            names = [*ours.gateway_names, *theirs.gateway_names]
            workers = [await ours.add(role, gateway=",".join(names)) for role in ROLES]
            await ours.paired(gateways[0], 1)
            line = json.loads(await gateways[1].said("a stranger was refused"))
            assert line["code"] == "other_secret"
            for role in ROLES:
                await theirs.add(role)
            await theirs.paired(gateways[1], 1)
            orders = wire.WorkerCommand(hello=hello(wire.Role.GATEWAY))
            address = _local(workers[1].facts["grpc_port"])
            with pytest.raises(NotOfThisMesh):
                await call(within(theirs.secret), address, WORKER_SESSION, orders)
            for mesh, gateway in zip((ours, theirs), gateways, strict=True):
                gauges = await mesh.gauges(gateway)
                assert [gauges[f"workers:{role}"] for role in ROLES] == [1, 1]
                ids, _ = await mesh.ask_grpc(gateway, a_prompt(60), 9)
                assert ids == fake_ids(a_prompt(60), 9)
            assert all(worker.is_alive for worker in workers)


@pytest.mark.parametrize("role", ROLES)
async def test_a_worker_of_an_older_release_is_told_what_to_do(target: Target, role: str) -> None:
    """It cannot prove anything: whatever it was given, it hears which release it needs."""
    older = await target.mesh.start(role, module=ODD, odd_protocol=2, mesh_secret="")
    version = f"protocol {codec.PROTOCOL_VERSION}"
    await require_refused(older, "run one release", version, "releases before protocol 3")


@pytest.mark.parametrize("has_secret", [True, False])
async def test_releases_that_do_not_fit_name_each_other(has_secret: bool) -> None:
    """With a secret and without: the refusal says what each of the two speaks."""
    async with process_mesh(has_secret=has_secret) as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            newer = await mesh.start("decode", module=ODD, odd_protocol=codec.PROTOCOL_VERSION + 1)
            ours, theirs = codec.PROTOCOL_VERSION, codec.PROTOCOL_VERSION + 1
            await require_refused(newer, f"protocol {theirs}", f"process {ours}", "one release")
            assert gateway.is_alive


async def test_a_worker_that_is_pointed_to_the_clients_door_is_told_the_right_one(
    target: Target,
) -> None:
    """With and without a secret."""
    clients = target.door("clients")
    lost = await target.mesh.start("prefill", gateway=clients)
    await require_refused(lost, str(clients), "is no door of a mesh")
    lost = await target.mesh.start("prefill", gateway=clients, mesh_secret="")
    await require_refused(lost, str(clients), "--mesh-port")


async def test_a_clock_that_is_off_by_years_matters_to_nobody() -> None:
    """No proof asks for the time."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            for role, years in zip(ROLES, (-20, 30), strict=True):
                await mesh.start(role, module=ODD, odd_clock_s=years * 365 * 86400)
            await mesh.paired(gateway, 1)
            ids, _ = await mesh.ask_grpc(gateway, a_prompt(40), 9)
            assert ids == fake_ids(a_prompt(40), 9)
