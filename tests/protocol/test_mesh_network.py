"""Connections that begin with a proof: who is let in, who is not, and what each of them is told."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hyperframe.frame import GoAwayFrame
from structlog.testing import capture_logs

from shared import wire
from shared.address import Address
from shared.errors import (
    IncompatiblePeer,
    MeshError,
    NotOfThisMesh,
    RemoteProtocolError,
    WorkerLost,
)
from shared.ids import Incarnation
from shared.membership.mesh_network import MeshNetwork
from shared.membership.proof import STAMP_KEY, Opening, agreement, stamp
from shared.mesh_secret import MeshSecret
from shared.messages import codec
from shared.rpc.methods import MESH_PROVE, WORKER_SESSION
from shared.rpc.network import Network
from shared.rpc.stream import open_stream
from tests.support.calls import open_call
from tests.support.echo_service import EchoService, reserve
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_loop import virtual_time

SERVER = Address("decode-0", 9000)
SECRET, OTHER_SECRET = MeshSecret("5a" * 32), MeshSecret("5b" * 32)


@dataclass
class Ends:
    """A network, its echo service behind a proof, and who dials."""

    network: MemoryNetwork
    echo: EchoService

    def dialler(self, secret: MeshSecret = SECRET, seed: int = 2) -> Network:
        return _within(self.network.at("gateway-0"), secret, "gateway", seed)


def _within(network: Network, secret: MeshSecret, role: str, seed: int) -> Network:
    random_bytes = random.Random(seed).randbytes
    return MeshNetwork(network, secret, random_bytes, role=role, incarnation=Incarnation(seed))


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    network, echo = MemoryNetwork(), EchoService()
    door = _within(network.at("decode-0"), SECRET, "decode", 1)
    async with door.serve(SERVER, echo.servicers):
        yield Ends(network, echo)


async def ask(network: Network | Any, times: int = 1) -> None:
    """Dial, and call a method so many times. Raises MeshError."""
    async with network.channel(SERVER) as channel:
        for number in range(times):
            async with open_stream(channel, WORKER_SESSION) as stream:
                await stream.send(reserve(number))
                event = await stream.receive()
                assert event is not None
                assert event.granted.stream_id == number


async def test_both_know_the_secret() -> None:
    """Every call on the connection is served, and another connection proves anew."""
    async with ends() as it:
        await ask(it.dialler(), times=3)
        await ask(it.dialler())


@virtual_time
async def test_a_connection_that_takes_no_more_calls_is_not_replaced() -> None:
    """Nobody has proven anything on another one: who dialled is told to dial again, and taken for
    no stranger."""
    network, echo = MemoryNetwork(), EchoService()
    door = _within(network.at("decode-0"), SECRET, "decode", 1)
    async with (
        door.serve(SERVER, echo.servicers) as server,
        _within(network.at("gateway-0"), SECRET, "gateway", 2).channel(SERVER) as channel,
    ):
        (left,) = server._protocols
        left._transport.write(GoAwayFrame(0, last_stream_id=2**31 - 1).serialize())
        await asyncio.sleep(0.05)
        with pytest.raises(WorkerLost, match="dial again"):
            async with open_stream(channel, WORKER_SESSION) as stream:
                await stream.receive()


def test_proofs_and_stamps_are_to_the_byte_what_the_page_says() -> None:
    """docs/protocol.md, with hmac alone: a worker of another make has nothing else."""

    def u64(*numbers: int) -> bytes:
        return b"".join(number.to_bytes(8, "little") for number in numbers)

    first = u64(8, 3, 5, 2) + b"v1" + b"d" * 32
    second = u64(8, 1, 6, 3) + b"v22" + b"l" * 32
    key = bytes(range(32))
    extracted = hmac.digest(u64(len(first)) + first + second, key, "sha256")
    infos = ("proof of the dialler", "proof of the listener", "key of the connection")
    dialler = wire.Hello(protocol_version=8, role=wire.Role(3), incarnation=5, version="v1")
    listener = wire.Hello(protocol_version=8, role=wire.Role(1), incarnation=6, version="v22")
    made = agreement(
        MeshSecret(key.hex()), Opening(dialler, b"d" * 32), Opening(listener, b"l" * 32)
    )
    assert made == tuple(
        hmac.digest(extracted, b"pdmesh/" + info.encode() + b"\x01", "sha256") for info in infos
    )
    path = "/pdmesh.v1.Registry/Join"
    told = hmac.new(made.key, b"7 " + path.encode(), "sha256").hexdigest()
    assert stamp(made.key, 7, path) == f"7-{told}"


async def test_another_secret_is_refused_by_whoever_is_dialled() -> None:
    """Before a method runs, with one sentence that says where and what to do."""
    async with ends() as it:
        with pytest.raises(NotOfThisMesh) as refusal:
            await ask(it.dialler(OTHER_SECRET))
        assert refusal.value.code == "other_secret"
        for word in (str(SERVER), "decode worker", "gateway", "--mesh-secret-file"):
            assert word in refusal.value.message
        assert it.echo.num_started == 0
        await ask(it.dialler())


async def test_without_a_proof_no_method_is_served() -> None:
    """Health checks are: they tell nothing. What is said at the refusal names the remedy."""
    async with ends() as it:
        with pytest.raises(NotOfThisMesh, match="has not proven") as refusal:
            await ask(it.network.at("stranger"))
        assert "protocol 3" in refusal.value.message
        assert refusal.value.code == "no_proof"


async def test_a_door_that_asks_for_no_secret_is_not_trusted() -> None:
    """Whoever took the address would get orders, and the prompts in them."""
    network, echo = MemoryNetwork(), EchoService()
    async with network.at("decode-0").serve(SERVER, echo.servicers):
        with pytest.raises(NotOfThisMesh, match="asks for no mesh secret") as refusal:
            await ask(_within(network.at("gateway-0"), SECRET, "gateway", 2))
        assert refusal.value.code == "no_secret_there"
    assert echo.num_started == 0


@contextlib.asynccontextmanager
async def a_listener_that_says(*answers: wire.Proof) -> AsyncIterator[MemoryNetwork]:
    """Serve ``Mesh.Prove`` with answers that were made beforehand."""
    from shared.rpc.service import Servicer, bind

    network = MemoryNetwork()

    async def answer(stream: Any) -> None:
        for message in answers:
            await stream.receive()
            await stream.send(message)

    async with network.at("decode-0").serve(SERVER, [Servicer(bind(MESH_PROVE, answer))]):
        yield network


def an_opening(version: int = codec.PROTOCOL_VERSION, nonce: bytes = b"n" * 32) -> wire.Proof:
    hello = wire.Hello(
        protocol_version=version, role=wire.Role.DECODE, incarnation=7, version="0.1"
    )
    return wire.Proof(hello=hello, nonce=nonce)


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ([an_opening(), wire.Proof(proof=bytes(32))], NotOfThisMesh, "different mesh secrets"),
        ([an_opening(), wire.Proof()], NotOfThisMesh, "different mesh secrets"),
        ([an_opening()], NotOfThisMesh, "different mesh secrets"),
        ([an_opening(version=2)], IncompatiblePeer, "(0.1) speaks protocol 2, this process "),
        ([an_opening(nonce=b"")], RemoteProtocolError, "nonce"),
        ([wire.Proof(nonce=bytes(32))], RemoteProtocolError, "hello"),
        ([], RemoteProtocolError, "nonce"),
    ],
)
async def test_who_is_dialled_must_prove_as_well(
    answers: list[wire.Proof], kind: type[MeshError], words: str
) -> None:
    """An address can be taken over: a listener that cannot prove gets no call at all."""
    async with a_listener_that_says(*answers) as network:
        with pytest.raises(kind) as refusal:
            await ask(_within(network.at("gateway-0"), SECRET, "gateway", 2))
        assert words in refusal.value.message


async def test_a_proof_cannot_be_replayed() -> None:
    """What an honest dialler said on its connection is worth nothing on the next one."""
    async with ends() as it:
        said: list[wire.Proof] = []
        plain = it.network.at("stranger")
        honest = it.dialler()
        assert isinstance(honest, MeshNetwork)
        async with plain.channel(SERVER) as channel:
            key = await honest._prove(_Recorded(channel, said))
            assert len(said) == 2
            await _require_served(channel, stamp(key, 1, WORKER_SESSION.path))
        async with plain.channel(SERVER) as channel:
            async with open_stream(channel, MESH_PROVE) as stream:
                await stream.send(said[0])
                assert await stream.receive() is not None
                await stream.send(said[1], end=True)
                with pytest.raises(NotOfThisMesh):
                    await stream.receive()
            with pytest.raises(NotOfThisMesh):
                await _require_served(channel, stamp(key, 2, WORKER_SESSION.path))


async def test_stamps_are_needed_fresh_and_for_their_own_method() -> None:
    """A proxy may carry a stranger's calls on a connection that somebody else has proven."""
    async with ends() as it:
        honest = it.dialler()
        assert isinstance(honest, MeshNetwork)
        async with it.network.at("proxy").channel(SERVER) as channel:
            key = await honest._prove(channel)
            good = stamp(key, 5, WORKER_SESSION.path)
            for bad in ("x", "5", good[:-1], stamp(bytes(32), 5, WORKER_SESSION.path)):
                with pytest.raises(NotOfThisMesh):
                    await _require_served(channel, bad)
            with pytest.raises(NotOfThisMesh):
                await _require_served(channel, stamp(key, 5, "/pdmesh.v1.Transfer/Pair"))
            await _require_served(channel, good)
            for again in (good, stamp(key, 4, WORKER_SESSION.path)):
                with pytest.raises(NotOfThisMesh):
                    await _require_served(channel, again)
            await _require_served(channel, stamp(key, 6, WORKER_SESSION.path))


async def test_however_many_knock_the_log_gets_one_line() -> None:
    """Else a stranger could fill the disk."""
    async with ends() as it:
        with capture_logs() as logs:
            for _ in range(20):
                with pytest.raises(NotOfThisMesh):
                    await ask(it.network.at("stranger"))
                with pytest.raises(NotOfThisMesh):
                    await ask(it.dialler(OTHER_SECRET))
        (line,) = [one for one in logs if one["event"] == "a stranger was refused"]
        assert line["peer"].startswith("stranger:")
        assert line["code"] == "no_proof"


async def test_a_role_below_zero_is_a_strangers_word_and_no_bug_of_ours() -> None:
    """It does not fit the bytes that are proven; a traceback a knock would fill the disk, too."""
    opening = an_opening()
    assert opening.hello is not None
    opening.hello.role = wire.Role(-1)
    async with ends() as it:
        with capture_logs() as logs:
            for _ in range(3):
                async with (
                    it.network.at("stranger").channel(SERVER) as channel,
                    open_stream(channel, MESH_PROVE) as stream,
                ):
                    await stream.send(opening)
                    with pytest.raises(RemoteProtocolError, match="role"):
                        await stream.receive()
        assert [one["event"] for one in logs] == ["a stranger was refused"]


@virtual_time
async def test_a_listener_that_says_nothing_is_left() -> None:
    """Dialling ends in time, with a sentence."""
    network = MemoryNetwork()
    from shared.rpc.service import Servicer, bind

    async def silent(stream: Any) -> None:
        while await stream.receive() is not None:
            pass

    async with network.at("decode-0").serve(SERVER, [Servicer(bind(MESH_PROVE, silent))]):
        dialler = _within(network.at("gateway-0"), SECRET, "gateway", 2)
        with pytest.raises(WorkerLost, match="no proof"):
            await ask(dialler)
        network.fabric.partition("gateway-0", "decode-0")
        with pytest.raises(WorkerLost, match="no connection: is the port open"):
            await ask(dialler)


class _Recorded:
    """A channel that keeps what is sent on it."""

    def __init__(self, channel: Any, said: list[wire.Proof]) -> None:
        self._channel = channel
        self._said = said

    def request(self, *args: Any, **kwargs: Any) -> Any:
        raw = self._channel.request(*args, **kwargs)
        send = raw.send_message

        async def recorded(message: wire.Proof, **options: Any) -> None:
            self._said.append(message)
            await send(message, **options)

        raw.send_message = recorded
        return raw


async def _require_served(channel: Any, text: str) -> None:
    metadata = {STAMP_KEY: text}
    async with open_call(channel, WORKER_SESSION, metadata=metadata) as stream:
        await stream.send(reserve(1))
        assert await stream.receive() is not None
