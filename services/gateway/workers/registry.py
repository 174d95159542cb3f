"""``Registry.Join``: how workers become members. The stream is the membership: when it ends, the
worker has left.

The gateway is the registry; there is nothing else to run. A worker says what it is, then how it
is; the gateway answers with whom it is to pair up. Addresses come from here alone, never from a
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from services.gateway.core.worker import PLACES, Role, Worker
from services.gateway.workers.membership import Membership
from shared import wire
from shared.address import is_host
from shared.errors import IncompatiblePeer, Overloaded, RemoteProtocolError, ShuttingDown
from shared.home import Home
from shared.ids import Incarnation
from shared.liveness import IDLE, Liveness, PeerState
from shared.messages import codec
from shared.messages.kv_codec import kv_from_wire
from shared.messages.status_codec import StatusReader
from shared.rpc.methods import REGISTRY_JOIN
from shared.rpc.service import FIRST_MESSAGE_S, ServerStream, Servicer, bind
from shared.runtime.groups import TaskGroup, plain_errors
from shared.worker_status import GATHER_S

MAX_WORKERS = PLACES
"""Workers of one gateway; each costs it a connection and three tasks."""

JoinStream = ServerStream[Any, Any]


class Registry:
    """The servicer of ``Registry.Join``."""

    def __init__(self, members: Membership, incarnation: Incarnation) -> None:
        self._members = members
        self._closing = asyncio.Event()
        self._peers: tuple[Worker, ...] = ()
        self._peer_list = _peer_list(())
        self._hello = codec.own_hello(wire.Role.GATEWAY, incarnation)

    @property
    def servicer(self) -> Servicer:
        """What ``Network.serve`` takes."""
        return Servicer(bind(REGISTRY_JOIN, self.join))

    def close(self) -> None:
        """End every worker's membership: this gateway stops."""
        self._closing.set()
        self._members.tell_all()

    async def join(self, stream: JoinStream) -> None:
        """Serve one worker until its stream ends."""
        report = await stream.receive(within_s=FIRST_MESSAGE_S)
        if report is None or report.announce is None:
            raise RemoteProtocolError("a worker's first message must be its announcement")
        worker = read_announcement(report.announce, stream.peer.host)
        is_full = len(self._members.table) >= MAX_WORKERS
        # One that joins anew, over another stream, already has its place.
        if is_full and self._members.table.get(worker.incarnation) is None:
            raise Overloaded(f"{MAX_WORKERS} workers have joined: no more are taken")
        try:
            self._members.join(worker)
        except IncompatiblePeer as error:
            await stream.send(wire.GatewayDirective(refused=codec.error_to_wire(error)))
            return
        reason = "its join stream ended"
        heard = Liveness(asyncio.get_running_loop().time(), IDLE)
        try:
            await stream.send(wire.GatewayDirective(hello=self._hello))
            with plain_errors():
                async with TaskGroup() as tasks:
                    teller = tasks.create_task(self._tell(stream, worker))
                    reader = tasks.create_task(self._read(stream, worker, heard))
                    reason = await self._end_of(reader, heard)
                    teller.cancel()
        finally:
            self._members.leave(worker, reason)

    async def _end_of(self, reader: asyncio.Task[str], heard: Liveness) -> str:
        """Return why a worker's stream is over: what its reader says, or that it is silent."""
        loop = asyncio.get_running_loop()
        while not reader.done():
            if heard.state(now := loop.time()) is PeerState.DEAD:
                reader.cancel()
                return f"no report for {IDLE.dead_after_s:g} s"
            at = heard.next_check_at(now)
            await asyncio.wait([reader], timeout=at - now)
            # This loop may have stood still itself: what it has not read is no silence.
            heard.slept(at, loop.time())
        return reader.result()

    async def _read(self, stream: JoinStream, worker: Worker, heard: Liveness) -> str:
        reader, incarnation = StatusReader(), worker.incarnation
        while True:
            report = await stream.receive()
            heard.heard(asyncio.get_running_loop().time())
            if report is None:
                return "it left"
            known = self._members.table.get(incarnation)
            if known is None:
                return "a stream that had replaced this one ended"  # its worker joins anew
            if report.status is not None and known is worker:
                self._members.update(incarnation, reader.read(report.status))
                if report.status.kv is not None:
                    self._members.told_prefixes(worker, kv_from_wire(report.status.kv))

    async def _tell(self, stream: JoinStream, worker: Worker) -> None:
        """Tell a worker its standing partners, one more that is needed, how often to report and
        where to move, at each change, until this gateway stops."""
        told: tuple[Worker, ...] = ()
        told_home: Home | None = None
        told_s = GATHER_S
        directives = self._members.directives[worker.incarnation]
        while not self._closing.is_set():
            changed = directives.next
            peers = self._members.table.standing_partners(worker)
            if peers is not told:
                told = peers
                await stream.send(self._list(peers))
            if self._members.gather_s != told_s:
                told_s = self._members.gather_s
                await stream.send(wire.GatewayDirective(pace=wire.Pace(gather_s=told_s)))
            # Told again on the next stream, for this one may end before it has arrived.
            home = self._members.homes.get(worker.incarnation)
            if home is not None and home is not told_home:
                told_home = home
                role = codec.role_to_wire(home.role)
                order = wire.SetHome(role=role, epoch=home.epoch, order=home.order)
                await stream.send(wire.GatewayDirective(home=order))
            for directive in [*self._directives(worker)]:  # at once, whatever a send waits for
                await stream.send(directive)
            await changed.wait()
        raise ShuttingDown("this gateway is shutting down", retry_after_s=1.0)

    def _directives(self, worker: Worker) -> Iterator[wire.GatewayDirective]:
        """Take what a worker is to be told once. Not for a stream that a rejoin has replaced: what
        is sent there may reach nobody."""
        if not self._members.is_here(worker):
            return
        for peer in self._members.pairs.pop(worker.incarnation, ()):
            yield wire.GatewayDirective(pair=_peer(peer))
        prefixes = self._members.prefixes
        if prefixes is not None and (ask := prefixes.take_ask(worker.incarnation)) is not None:
            yield wire.GatewayDirective(kv=wire.AskKv(**ask._asdict()))

    def _list(self, peers: tuple[Worker, ...]) -> wire.GatewayDirective:
        """It is one message for all who get it, until it changes."""
        if not peers:
            return _peer_list(())
        if peers is not self._peers:
            self._peers, self._peer_list = peers, _peer_list(peers)
        return self._peer_list


def _peer_list(peers: Sequence[Worker]) -> wire.GatewayDirective:
    return wire.GatewayDirective(peers=wire.PeerList(peers=[*map(_peer, peers)]))


def _peer(worker: Worker) -> wire.Peer:
    return wire.Peer(incarnation=worker.incarnation, host=worker.host, port=worker.port)


def read_announcement(announce: wire.WorkerAnnounce, peer_host: str) -> Worker:
    """Validate an announcement. Raises RemoteProtocolError, IncompatiblePeer."""
    hello = codec.require_hello(announce.hello)
    if announce.model is None or announce.layout is None:
        raise RemoteProtocolError("the announcement lacks model or layout")
    role = codec.ROLES.get(wire.Role(hello.role))
    if role is None:
        raise RemoteProtocolError("only prefill and decode workers join", param="role")
    named = announce.serves or [hello.role]
    serves = tuple(it for it in Role if it in map(codec.ROLES.get, named))
    if len(serves) < len(named) or role not in serves:
        raise RemoteProtocolError(
            "serves must be different roles of workers, its own among them", param="serves"
        )
    if not 0 < announce.port < 65536:
        raise RemoteProtocolError("port must be in 1..65535", param="port")
    if not (announce.num_blocks and announce.block_size):
        raise RemoteProtocolError("num_blocks and block_size must be positive")
    host = announce.host or peer_host
    if not is_host(host):
        raise RemoteProtocolError("host must be a host name or an IP address", param="host")
    return Worker(
        role=role,
        incarnation=Incarnation(hello.incarnation),
        host=host,
        port=announce.port,
        model=codec.model_from_wire(announce.model),
        layout=codec.layout_from_wire(announce.layout),
        num_blocks=announce.num_blocks,
        block_size=announce.block_size,
        serves=serves,
    )
