"""A network whose connections begin with a proof: the doors of a mesh that has a secret.

``serve`` lets nobody call a method (health and reflection aside) before ``Mesh.Prove`` has gone
well on the same connection; ``channel`` proves as soon as it is dialled, and stamps its calls. So
whoever serves or dials here, the gateway's registry, sessions, pairs, need not know of it. What is
proven, and how, is ``proof.py``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import structlog

from shared import wire
from shared.address import Address
from shared.errors import (
    IncompatiblePeer,
    MeshError,
    NotOfThisMesh,
    RemoteProtocolError,
    WorkerLost,
)
from shared.http2.complaints import Complaints
from shared.ids import Incarnation, RandomBytes
from shared.membership.proof import (
    NONCE_BYTES,
    STAMP_KEY,
    Agreement,
    Opening,
    agreement,
    stamp,
    stamped_number,
)
from shared.mesh_secret import MeshSecret
from shared.messages import codec
from shared.rpc.call_server import CallServer
from shared.rpc.methods import MESH_PROVE
from shared.rpc.network import Network
from shared.rpc.service import ServerStream, Servicer, bind, refuse
from shared.rpc.stream import open_stream

_log = structlog.get_logger(__name__)

PROOF_WITHIN_S = 5.0

_REMEDY = (
    "give the gateway and all workers of a mesh the same --mesh-secret-file (or PDMESH_MESH_SECRET)"
)


class MeshNetwork:
    """A ``Network`` on top of another one. role: gateway, prefill or decode."""

    def __init__(
        self,
        network: Network,
        secret: MeshSecret,
        random_bytes: RandomBytes,
        *,
        role: str,
        incarnation: Incarnation,
    ) -> None:
        self._network = network
        self._secret = secret
        self._hello = codec.own_hello(wire.Role[role.upper()], incarnation)
        self._random_bytes = random_bytes
        # By connection, and weak: one that is gone takes its proof with it.
        self._proven: WeakKeyDictionary[Any, _Proven] = WeakKeyDictionary()
        self._complaints = Complaints()

    def serve(
        self, address: Address, handlers: Sequence[Any], **options: Any
    ) -> AbstractAsyncContextManager[CallServer]:
        """See Network. options: of the one below."""
        prove = Servicer(bind(MESH_PROVE, self._answer))
        guarded = [_Guarded(handler, self._why_refused) for handler in handlers]
        known = self._proven.__contains__
        return self._network.serve(address, [*guarded, prove], is_known=known, **options)

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncGenerator[StampedChannel]:
        """See Network. Raises MeshError: it cannot be reached, or there is no proof."""
        async with self._network.channel(address) as channel:
            try:
                key = await self._prove(channel)
            except IncompatiblePeer as error:
                raise type(error)(f"{address}: {error.message}", code=error.code) from error
            yield StampedChannel(channel, key)

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await self._network.resolve(host, port)

    # --- who dials --------------------------------------------------------------------------------

    async def _prove(self, channel: Any) -> bytes:
        """Prove, have the other end prove, and return the connection's key."""
        missing = "connection: is the port open, also to firewalls and network policies?"
        try:
            async with (
                asyncio.timeout(PROOF_WITHIN_S),
                open_stream(channel, MESH_PROVE) as stream,
            ):
                nonce = self._random_bytes(NONCE_BYTES)
                await stream.send(wire.Proof(hello=self._hello, nonce=nonce))
                missing = "proof of the mesh's secret"
                theirs = _opening(await stream.receive())
                agreed = agreement(self._secret, Opening(self._hello, nonce), theirs)
                await stream.send(wire.Proof(proof=agreed.of_dialler), end=True)
                self._check(await stream.receive(), agreed.of_listener, theirs)
                # To the call's end: what is still open when the block ends is reset.
                await stream.receive()
                return agreed.key
        except TimeoutError:
            raise WorkerLost(f"within {PROOF_WITHIN_S:g} s no {missing}") from None
        except IncompatiblePeer as error:
            if error.code == "unimplemented":
                raise NotOfThisMesh(
                    "asks for no mesh secret, and this process has one: it is no door of a mesh, "
                    f"or was started without; {_REMEDY}",
                    code="no_secret_there",
                ) from error
            raise

    def _check(self, message: wire.Proof | None, wanted: bytes, theirs: Opening) -> None:
        """Raises NotOfThisMesh: the other end has not proven that it knows our secret."""
        # Compared in constant time: how long it takes says nothing of where the two differ.
        if message is None or not hmac.compare_digest(message.proof, wanted):
            ours, other = _role(self._hello.role), _role(theirs.hello.role)
            raise NotOfThisMesh(
                f"this {ours} and the {other} have different mesh secrets; {_REMEDY}",
                code="other_secret",
            )

    # --- who is dialled ---------------------------------------------------------------------------

    async def _answer(self, stream: ServerStream[wire.Proof, wire.Proof]) -> None:
        """Serve ``Mesh.Prove``."""
        try:
            agreed = await self._proven_by(stream)
        except MeshError as error:
            self._note_stranger(stream.peer, error)
            raise
        # Before the answer leaves: whoever reads it may call in the same instant.
        self._proven[stream.connection] = _Proven(agreed.key)
        await stream.send(wire.Proof(proof=agreed.of_listener))

    async def _proven_by(self, stream: ServerStream[wire.Proof, wire.Proof]) -> Agreement:
        theirs = _opening(await stream.receive(within_s=PROOF_WITHIN_S))
        nonce = self._random_bytes(NONCE_BYTES)
        await stream.send(wire.Proof(hello=self._hello, nonce=nonce))
        agreed = agreement(self._secret, theirs, Opening(self._hello, nonce))
        proof = await stream.receive(within_s=PROOF_WITHIN_S)
        self._check(proof, agreed.of_dialler, theirs)
        return agreed

    def _why_refused(self, raw: Any, path: str) -> MeshError | None:
        """Look at the stamp of a call; None = it may be served."""
        proven = self._proven.get(raw._stream.connection)
        text = dict(raw.metadata or {}).get(STAMP_KEY)
        if proven is not None and isinstance(text, str) and proven.takes(text, path):
            return None
        me = self._hello
        error = NotOfThisMesh(
            f"this {_role(me.role)} ({me.version}, protocol {me.protocol_version}) serves nobody "
            "who has not proven to know the mesh's secret; releases before protocol 3 cannot: run "
            f"one release, and {_REMEDY}",
            code="no_proof",
        )
        host, port, *_ = raw.peer.addr() or ("", 0)
        self._note_stranger(Address(host, port), error)
        return error

    def _note_stranger(self, peer: Address, error: MeshError) -> None:
        num_untold = self._complaints.count(asyncio.get_running_loop().time())
        if num_untold is not None:
            _log.warning(
                "a stranger was refused",
                peer=str(peer),
                error=error.message,
                code=error.code,
                count=num_untold + 1,
            )


class StampedChannel:
    """A channel whose connection is proven, as ``open_stream`` uses it. A connection that breaks
    is not replaced: nobody has proven anything on the next one."""

    def __init__(self, channel: Any, key: bytes) -> None:
        self._channel = channel
        self._key = key
        self._num_calls = 0

    def request(self, name: str, *shape: Any) -> Any:
        """Begin a call, as ``grpclib.client.Channel.request`` does. Raises WorkerLost: the
        connection is lost, or its other end takes no more calls (GOAWAY)."""
        if not self._channel._connected:  # grpclib would make another one
            raise WorkerLost("the connection was closed after the proof; dial again")
        self._num_calls += 1
        stamped = {STAMP_KEY: stamp(self._key, self._num_calls, name)}
        return self._channel.request(name, *shape, metadata=stamped)


class _Proven:
    """A connection whose other end has proven."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last_number = 0

    def takes(self, text: str, path: str) -> bool:
        """Whether a stamp is this connection's, and fresh."""
        number = stamped_number(self._key, text, path)
        # A stamp that was seen on the wire is worth nothing a second time.
        if number is None or number <= self._last_number:
            return False
        self._last_number = number
        return True


class _Guarded:
    """A servicer whose methods ask first."""

    def __init__(self, servicer: Any, why_refused: Callable[[Any, str], MeshError | None]) -> None:
        self._servicer = servicer
        self._why_refused = why_refused

    def __mapping__(self) -> dict[str, Any]:
        return {
            path: method._replace(func=partial(self._call, path, method.func))
            for path, method in self._servicer.__mapping__().items()
        }

    async def _call(self, path: str, serve: Callable[[Any], Awaitable[None]], raw: Any) -> None:
        error = self._why_refused(raw, path)
        await (serve(raw) if error is None else refuse(raw, error))


def _opening(message: wire.Proof | None) -> Opening:
    """Read the first message of either end. Raises RemoteProtocolError. IncompatiblePeer: another
    protocol version."""
    if message is None or len(message.nonce) != NONCE_BYTES:
        raise RemoteProtocolError("a proof begins with a hello and a nonce")
    hello = codec.require_hello(message.hello)
    if hello.role < 0:  # no such number is proven
        raise RemoteProtocolError("a role is no negative number", param="role")
    return Opening(hello, message.nonce)


def _role(number: int) -> str:
    names = {wire.Role.GATEWAY: "gateway", wire.Role.PREFILL: "prefill worker"}
    return {**names, wire.Role.DECODE: "decode worker"}.get(wire.Role(number), "process")
