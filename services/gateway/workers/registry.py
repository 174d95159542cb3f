"""``Registry.Join``: how workers become members. The stream is the membership: when it ends, the
worker has left.

The gateway is the registry; there is nothing else to run. A worker says what it is, then how it
is; the gateway answers with whom prefill may push to. Addresses come from here alone, never from a
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.gateway.core.worker import JoinedModel, Role, Worker, WorkerStatus
from services.gateway.workers.membership import Membership
from shared import wire
from shared.address import is_host
from shared.errors import IncompatiblePeer, Overloaded, RemoteProtocolError, ShuttingDown
from shared.ids import Incarnation, StreamId
from shared.messages import codec
from shared.messages.columns import unpack_u64
from shared.rpc.methods import REGISTRY_JOIN
from shared.rpc.service import FIRST_MESSAGE_S, ServerStream, Servicer, bind
from shared.runtime.groups import plain_errors

_ROLES = {wire.Role.PREFILL: Role.PREFILL, wire.Role.DECODE: Role.DECODE}
_WIRE_ROLES = {role: name for name, role in _ROLES.items()}

MAX_WORKERS = 1024
"""Workers of one gateway; each costs it a connection and two tasks."""

NO_REPORT_S = 6.0
"""A worker's session tells sooner that it is gone; this ends the membership of one without."""

JoinStream = ServerStream[Any, Any]


class Registry:
    """The servicer of ``Registry.Join``."""

    def __init__(self, members: Membership, incarnation: Incarnation, version: str) -> None:
        self._members = members
        self._closing = asyncio.Event()
        self._peers: tuple[Worker, ...] | None = None
        self._peer_list = wire.GatewayDirective()
        self._hello = wire.Hello(
            protocol_version=codec.PROTOCOL_VERSION,
            role=wire.Role.GATEWAY,
            incarnation=incarnation,
            version=version,
        )

    @property
    def servicer(self) -> Servicer:
        """What ``Network.serve`` takes."""
        return Servicer(bind(REGISTRY_JOIN, self.join))

    def close(self) -> None:
        """End every worker's membership: this gateway stops."""
        self._closing.set()
        self._members.directives.tell()

    async def join(self, stream: JoinStream) -> None:
        """Serve one worker until its stream ends."""
        report = await stream.receive(within_s=FIRST_MESSAGE_S)
        if report is None or report.announce is None:
            raise RemoteProtocolError("a worker's first message must be its announcement")
        worker = read_announcement(report.announce, stream.peer.host)
        if self._members.num_workers >= MAX_WORKERS:
            raise Overloaded(f"{MAX_WORKERS} workers have joined: no more are taken")
        try:
            self._members.join(worker)
        except IncompatiblePeer as error:
            await stream.send(wire.GatewayDirective(refused=codec.error_to_wire(error)))
            return
        reason = "its join stream ended"
        try:
            await stream.send(wire.GatewayDirective(hello=self._hello))
            with plain_errors():
                async with asyncio.TaskGroup() as tasks:
                    teller = tasks.create_task(self._tell(stream, worker))
                    reason = await self._read(stream, worker.incarnation)
                    teller.cancel()
        finally:
            self._members.leave(worker, reason)

    async def _read(self, stream: JoinStream, incarnation: Incarnation) -> str:
        reader = _StatusReader()
        while True:
            try:
                async with asyncio.timeout(NO_REPORT_S):
                    report = await stream.receive()
            except TimeoutError:
                return f"no report for {NO_REPORT_S:g} s"
            if report is None:
                return "it left"
            if report.status is not None:
                self._members.update(incarnation, reader.read(report.status))

    async def _tell(self, stream: JoinStream, worker: Worker) -> None:
        """Tell a worker that pushes whom it may push to, and one that may move where to, at each
        change, until this gateway stops."""
        pushes = Role.PREFILL in worker.serves
        told: tuple[Worker, ...] | None = None
        while not self._closing.is_set():
            changed = self._members.directives.next
            peers = self._members.decode_workers
            if pushes and peers is not told:
                told = peers
                await stream.send(self._peers_of(worker))
            home = self._members.take_home(worker.incarnation)
            if home is not None:
                order = wire.SetHome(role=_WIRE_ROLES[home.role], epoch=home.epoch)
                await stream.send(wire.GatewayDirective(home=order))
            await changed.wait()
        raise ShuttingDown("this gateway is shutting down", retry_after_s=1.0)

    def _peers_of(self, worker: Worker) -> wire.GatewayDirective:
        """Return the list of decode workers. It is one message until it changes, for all but those
        that are in it: nobody is told of itself."""
        peers = self._members.decode_workers
        if Role.DECODE in worker.serves:
            return _peer_list([it for it in peers if it.incarnation != worker.incarnation])
        if peers is not self._peers:
            self._peers, self._peer_list = peers, _peer_list(peers)
        return self._peer_list


def _peer_list(peers: Sequence[Worker]) -> wire.GatewayDirective:
    listed = [wire.Peer(incarnation=it.incarnation, host=it.host, port=it.port) for it in peers]
    return wire.GatewayDirective(peers=wire.PeerList(peers=listed))


def read_announcement(announce: wire.WorkerAnnounce, peer_host: str) -> Worker:
    """Validate an announcement. Raises RemoteProtocolError, IncompatiblePeer."""
    hello = codec.require_hello(announce.hello)
    if announce.model is None or announce.layout is None:
        raise RemoteProtocolError("the announcement lacks model or layout")
    role = _ROLES.get(wire.Role(hello.role))
    if role is None:
        raise RemoteProtocolError("only prefill and decode workers join", param="role")
    serves = tuple(it for it in Role if it in map(_ROLES.get, announce.serves)) or (role,)
    if len(serves) < len(announce.serves) or role not in serves:
        raise RemoteProtocolError("must be different roles, its own among them", param="serves")
    if not (0 < announce.port < 65536 and announce.num_blocks > 0 and announce.block_size > 0):
        raise RemoteProtocolError("port, num_blocks and block_size must be positive")
    host = announce.host or peer_host
    if not is_host(host):
        raise RemoteProtocolError("must be a host name or an IP address", param="host")
    model = codec.model_from_wire(announce.model)
    return Worker(
        role=role,
        incarnation=Incarnation(hello.incarnation),
        host=host,
        port=announce.port,
        model=JoinedModel(
            name=model.name,
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            dtype=model.dtype,
            engine=model.engine,
        ),
        layout=codec.layout_from_wire(announce.layout),
        num_blocks=announce.num_blocks,
        block_size=announce.block_size,
        serves=serves,
    )


class _StatusReader:
    """Reads one worker's reports; who is paired is unpacked only where the column has changed."""

    def __init__(self) -> None:
        self._column = b""
        self._paired: frozenset[Incarnation] = frozenset()

    def read(self, status: wire.WorkerStatus) -> WorkerStatus:
        """Return the report as the table keeps it. Raises RemoteProtocolError."""
        if status.paired != self._column:
            paired = unpack_u64(status.paired, name="paired")
            self._column, self._paired = status.paired, frozenset(map(Incarnation, paired))
        return WorkerStatus(
            pending_tokens=status.pending_tokens,
            num_waiting=status.num_waiting,
            num_running=status.num_running,
            free_blocks=status.free_blocks,
            reserved_blocks=status.reserved_blocks,
            quarantined_blocks=status.quarantined_blocks,
            step_s=status.step_s,
            is_draining=status.draining,
            paired=self._paired,
            num_prompts=status.num_prompts,
            num_answers=status.num_answers,
            home=_ROLES.get(status.home),
            home_epoch=status.home_epoch,
            seen={
                Role.PREFILL: StreamId(status.seen_prefill_id),
                Role.DECODE: StreamId(status.seen_decode_id),
            },
        )
