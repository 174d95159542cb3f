"""A worker's registration: keeps it joined to every gateway behind every configured name.

The gateway is the registry (docs/protocol.md). Names are resolved again every ``RESOLVE_S`` and
whenever a gateway is lost, so gateways may come, go and multiply with nothing to configure. What
the gateways say about partners is merged.

This module knows no request and no KV.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import structlog

from shared import wire
from shared.address import Address, is_loopback, parse_address
from shared.config import MESH_PORT
from shared.errors import (
    IncompatiblePeer,
    LocalProtocolError,
    MeshError,
    RemoteProtocolError,
    WorkerLost,
    without_frames,
)
from shared.home import Home, Role
from shared.ids import NO_ORDER, Incarnation, MeshPeer, StreamId
from shared.kv.journal import Journal
from shared.kv.layout import KvLayout
from shared.liveness import IDLE
from shared.messages import codec
from shared.messages.kv_codec import kv_to_wire
from shared.messages.status_codec import status_to_wire
from shared.model_spec import ModelSpec
from shared.rpc.methods import REGISTRY_JOIN
from shared.rpc.network import Network
from shared.rpc.stream import ClientStream, open_stream
from shared.runtime.groups import TaskGroup, plain_errors
from shared.worker_status import GATHER_S, REPORT_S, WorkerStatus

_log = structlog.get_logger(__name__)

RESOLVE_S = 5.0
RETURNS_S = 0.5
"""The same while there is no gateway: the name of one that restarts may be gone for a moment."""

MAX_KV_INTERVAL_S = 10.0
"""Longest time that a gateway may ask a worker to keep changes of its prefixes back."""

_REJOIN_S = (*[0.05] * 40, *[0.2] * 40, 1.0)
"""A gateway that restarts is back within seconds, and its clients wait for its workers."""
_HELLO_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a worker is, for as long as its process lives.

    address: an empty host = the address that the worker's stream comes from. serves: the roles for
    which it takes orders, empty = ``role`` alone.
    """

    role: Role
    incarnation: Incarnation
    spec: ModelSpec
    layout: KvLayout
    address: Address
    num_blocks: int
    block_size: int
    serves: tuple[Role, ...] = ()


def advertised(advertise: str, listening: Address) -> Address:
    """Return where others reach a worker that listens there.

    advertise: '' = let the gateway look, ``host``, or ``host:port`` if the port is mapped, too.
    """
    if not advertise:
        return Address("", listening.port)
    return parse_address(advertise, param="advertise", default_port=listening.port)


class Registration:
    """All gateways of one worker. ``run`` owns every task.

    load: read whenever a status is due, and with it ``seen``: what of a gateway's orders it
    counts. on_peers: called with the standing partners that any gateway names, whenever they have
    changed. on_pair: a gateway asks for a pair with one more. on_drain: a gateway asked this worker
    to drain. on_change: ``num_joined`` has changed. journal: which prefixes are here, for gateways
    that ask.
    """

    def __init__(
        self,
        *,
        network: Network,
        gateways: Sequence[Address],
        announcement: Announcement,
        load: Callable[[], WorkerStatus],
        journal: Journal,
        seen: Callable[[Incarnation], StreamId] = lambda _: NO_ORDER,
        on_peers: Callable[[Sequence[MeshPeer]], None] = lambda _: None,
        on_pair: Callable[[MeshPeer], None] = lambda _: None,
        on_drain: Callable[[], None] = lambda: None,
        on_home: Callable[[Home], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._network = network
        self._gateways = tuple(gateways)
        self._announcement = announcement
        self._load = load
        self._seen = seen
        self._on_peers = on_peers
        self._on_pair = on_pair
        self._on_drain = on_drain
        self._on_home = on_home
        self._on_change = on_change
        self._journal = journal
        self._links: dict[Address, _Link] = {}
        self._peers: tuple[MeshPeer, ...] = ()
        self._was_accepted = False
        self._is_leaving = False
        self._look_again = asyncio.Event()

    @property
    def num_joined(self) -> int:
        """Gateways that know this worker now."""
        return len(self._joined)

    @property
    def _joined(self) -> set[Incarnation]:
        return {link.gateway for link in self._links.values() if link.gateway is not None}

    @property
    def not_ready_reason(self) -> str:
        """One sentence; '' when at least one gateway has taken this worker in."""
        if self.num_joined:
            return ""
        names = ", ".join(map(str, self._gateways))
        return f"no gateway joined yet ({names})"

    def report_soon(self) -> None:
        """The load has changed: send a status now, not at the next interval. Bursts make one
        status.
        """
        for link in self._links.values():
            link.has_news.set()

    async def leave(self, within_s: float) -> None:
        """Tell every gateway that this worker has drained, and wait until it has heard it: what
        just ends looks like a crash."""
        self._is_leaving = True
        self.report_soon()
        tasks = [link.task for link in self._links.values() if link.task and link.gateway]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    def rejoin(self, gateway: Incarnation) -> None:
        """The gateway went silent elsewhere: join it anew, for this stream alone would not notice a
        host that is gone.
        """
        for link in self._links.values():
            if link.gateway == gateway and link.stream is not None:
                link.stream.cancel()

    async def run(self) -> NoReturn:
        """Stay joined until cancelled.

        Raises IncompatiblePeer: the first gateway that answers refuses this worker. A refusal
        later, when this worker has been a member already, is that gateway's trouble: it is logged
        and tried again."""
        with plain_errors():
            async with TaskGroup() as tasks:
                while True:
                    self._look_again.clear()
                    await self._find_gateways(tasks)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RESOLVE_S if self.num_joined else RETURNS_S):
                            await self._look_again.wait()
        raise AssertionError("unreachable")

    async def _find_gateways(self, tasks: asyncio.TaskGroup) -> None:
        found: dict[Address, None] = {}
        for name in self._gateways:
            found.update(dict.fromkeys(await self._network.resolve(name.host, name.port)))
        for address in found:
            if address not in self._links:
                link = self._links[address] = _Link(address)
                link.task = tasks.create_task(self._keep_joined(link))
        for address, link in list(self._links.items()):
            # A name may lose an address before its gateway is gone: who is connected stays.
            if address not in found and not link.is_connected:
                del self._links[address]
                if link.task is not None:
                    link.task.cancel()
                    link.task = None  # which keeps how it ended, and that the link

    # --- one gateway ------------------------------------------------------------------------------

    async def _keep_joined(self, link: _Link) -> None:
        num_failures = 0
        while True:
            try:
                await self._join(link)
                reason: MeshError = WorkerLost("the gateway ended the registration")
            except IncompatiblePeer as refusal:
                link.is_refused = True
                if not (self._was_accepted or any(it.may_accept for it in self._links.values())):
                    raise
                reason = without_frames(refusal)
            except MeshError as error:
                link.is_absent = not link.is_connected
                reason = without_frames(error)
            finally:
                was_joined = self._left(link)
            if self._is_leaving:
                return
            if was_joined:
                num_failures = 0
                _log.warning("gateway lost", gateway=str(link.address), error=reason.message)
            elif num_failures == 0:
                _log.info("gateway not joined", gateway=str(link.address), error=reason.message)
            # A gateway that comes back may have another address behind the same name.
            self._look_again.set()
            await asyncio.sleep(_REJOIN_S[min(num_failures, len(_REJOIN_S) - 1)])
            num_failures += 1

    def _left(self, link: _Link) -> bool:
        gateway, link.gateway, link.stream = link.gateway, None, None
        self._journal.unsubscribe(link)
        link.is_connected = False
        self._name(link, ())
        if gateway is None:
            return False
        # The same gateway under another address (IPv4 and IPv6 of one name) has just forgotten this
        # worker with the link that ended: that other link must announce it again.
        self.rejoin(gateway)
        self._on_change()
        return True

    async def _join(self, link: _Link) -> None:
        async with (
            self._network.channel(link.address) as channel,
            open_stream(channel, REGISTRY_JOIN) as stream,
        ):
            link.is_connected, link.is_absent = True, False
            link.gather_s = GATHER_S  # until this gateway says another: it tells only what differs
            await stream.send(wire.WorkerReport(announce=self._announce()))
            try:
                gateway = await self._shake_hands(stream)
            except IncompatiblePeer as error:
                if error.code != "unimplemented":
                    raise
                raise IncompatiblePeer(
                    f"{link.address} is no door for workers: --gateway must be the gateway's "
                    f"--mesh-host and --mesh-port ({MESH_PORT} by default)",
                    code="no_registry",
                ) from error
            # Before anybody hears of it: ``num_joined`` and ``rejoin`` look at these.
            link.gateway, link.stream = gateway, stream
            self._was_accepted = True
            _log.info("gateway joined", gateway=str(link.address), incarnation=gateway)
            self._on_change()
            with plain_errors():
                async with TaskGroup() as tasks:
                    reporter = tasks.create_task(self._report(link, stream))
                    await self._listen(link, stream)
                    # The gateway has ended its side: nobody reads reports any more.
                    reporter.cancel()

    def _announce(self) -> wire.WorkerAnnounce:
        it = self._announcement
        # A longer prompt would not fit its order, and what does not fit ends a session; nor may a
        # sequence outgrow the pool: its own preemption would not make room for it.
        longest = min(it.spec.max_model_len, codec.MAX_TOKENS, it.num_blocks * it.block_size)
        spec = replace(it.spec, max_model_len=longest)
        return wire.WorkerAnnounce(
            hello=codec.own_hello(codec.role_to_wire(it.role), it.incarnation),
            model=codec.model_to_wire(spec),
            layout=codec.layout_to_wire(it.layout),
            host=it.address.host,
            port=it.address.port,
            num_blocks=it.num_blocks,
            block_size=it.block_size,
            serves=[*map(codec.role_to_wire, it.serves)],
        )

    async def _shake_hands(self, stream: ClientStream[Any, Any]) -> Incarnation:
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                directive = await stream.receive()
        except TimeoutError:
            raise WorkerLost(
                f"the gateway did not say hello within {_HELLO_WITHIN_S:g} s"
            ) from None
        if directive is None:
            raise WorkerLost("the gateway ended the registration before hello")
        if directive.refused is not None:
            # Only "incompatible" is for good; all else may pass (it drains, it starts).
            raise codec.error_from_wire(directive.refused)
        return codec.gateway_of(directive.hello)

    async def _report(self, link: _Link, stream: ClientStream[Any, Any]) -> None:
        told, told_at = None, 0.0
        while True:
            link.has_news.clear()
            is_last = self._is_leaving
            # Read in one breath with the load: an order in between would be counted twice, or not
            # at all.
            seen = self._seen(link.gateway or Incarnation(0))
            status = status_to_wire(self._load(), seen)
            joined = self._joined
            status.first_gateway, status.num_gateways = min(joined, default=0), len(joined)
            status.kv = self._kv_changes(link)
            now = asyncio.get_running_loop().time()
            if is_last or status != told or now >= told_at + IDLE.interval_s:
                await stream.send(wire.WorkerReport(status=status), end=is_last)
                told, told_at = status, now
            if is_last:
                return
            if status.kv is not None and not status.kv.is_whole:
                continue  # a snapshot, in pieces
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await link.has_news.wait()
                    await asyncio.sleep(link.gather_s)

    def _kv_changes(self, link: _Link) -> wire.KvChanges | None:
        """Return what is to be told of prefixes now; load goes out at once, this when it is due."""
        if asyncio.get_running_loop().time() < link.kv_due_at:
            return None
        changes = self._journal.report(link)
        if changes is None:
            return None
        if changes.is_whole:
            link.kv_due_at = asyncio.get_running_loop().time() + link.kv_interval_s
        return kv_to_wire(changes)

    def _ask_kv(self, link: _Link, ask: wire.AskKv) -> None:
        try:
            self._journal.subscribe(link, ask.granule_tokens)
        except LocalProtocolError as error:
            raise RemoteProtocolError(error.message, param="granule_tokens") from None
        link.kv_interval_s = _within(ask.interval_s, MAX_KV_INTERVAL_S, "interval_s")
        link.kv_due_at = 0.0
        link.has_news.set()

    async def _listen(self, link: _Link, stream: ClientStream[Any, Any]) -> None:
        async for directive in stream:
            if directive.refused is not None:
                raise codec.error_from_wire(directive.refused)
            if directive.peers is not None:
                self._name(link, tuple(map(_mesh_peer, directive.peers.peers)))
            if directive.pair is not None:
                self._on_pair(_mesh_peer(directive.pair))
            if directive.drain is not None:
                self._on_drain()
            if directive.home is not None:
                role = codec.ROLES.get(directive.home.role)
                if role is None:
                    raise RemoteProtocolError("no worker's role", param="role")
                self._on_home(Home(role, directive.home.epoch, directive.home.order))
            if directive.pace is not None:
                link.gather_s = _within(directive.pace.gather_s, REPORT_S, "gather_s")
            if directive.kv is not None:
                self._ask_kv(link, directive.kv)

    def _name(self, link: _Link, peers: tuple[MeshPeer, ...]) -> None:
        link.peers = peers
        # All that any gateway names, each once, in the order in which they are named.
        named = {peer.incarnation: peer for it in self._links.values() for peer in it.peers}
        before, self._peers = self._peers, tuple(named.values())
        if self._peers != before:
            self._on_peers(self._peers)


class _Link:
    """One address behind a gateway's name."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.gateway: Incarnation | None = None
        self.is_connected = False
        self.is_absent = self.is_refused = False
        self.stream: ClientStream[Any, Any] | None = None
        self.has_news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.kv_interval_s = self.kv_due_at = 0.0
        self.gather_s = GATHER_S
        self.peers: tuple[MeshPeer, ...] = ()
        """Whom its gateway names as standing partners."""

    @property
    def may_accept(self) -> bool:
        """Whether it has not refused this worker. Who was absent may come, but for an address of
        this machine: ``localhost`` is ::1, too, where hardly anybody listens."""
        return not (self.is_refused or (self.is_absent and is_loopback(self.address.host)))


def _within(seconds: float, most_s: float, name: str) -> float:
    if not 0 <= seconds <= most_s:
        raise RemoteProtocolError(f"must be 0 to {most_s:g} seconds", param=name)
    return seconds


def _mesh_peer(peer: wire.Peer) -> MeshPeer:
    if not (peer.incarnation and peer.host and 0 < peer.port < 65536):
        raise RemoteProtocolError("the gateway named a peer without incarnation, host or port")
    return MeshPeer(Incarnation(peer.incarnation), Address(peer.host, peer.port))
