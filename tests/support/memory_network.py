"""gRPC without sockets: the same HTTP/2 bytes through memory, in one process, deterministic.

``MemoryNetwork`` keeps the contract of ``TcpNetwork`` under any loop, virtual time included. Beyond
that a test may ``kill`` a host (every connection breaks, as by SIGKILL) and ``hold`` what travels
between two hosts (as a stopped process or a network partition does: nobody is told, bytes wait)
until ``release``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from grpclib.protocol import H2Protocol

from shared.address import Address
from shared.errors import LocalProtocolError
from shared.http2.connection import ConnectionLimits, GuardedProtocol
from shared.rpc.call_server import CallServer, IsKnown
from shared.rpc.tcp import GuardedChannel, closing
from shared.rpc.tls import ServerTls

FIRST_FREE_PORT = 20_000

_OWN_HOST = ("", "0.0.0.0", "::", "127.0.0.1")


class MemoryTransport(asyncio.Transport):
    """One end of a connection; bytes arrive after its latency, in order, unless they are held."""

    def __init__(self, fabric: MemoryFabric, ours: Address, theirs: Address) -> None:
        super().__init__({"peername": (theirs.host, theirs.port)})
        self.ours = ours
        self.theirs = theirs
        self._fabric = fabric
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = None
        self._peer: MemoryTransport | None = None
        self._on_the_way: deque[Callable[[], None]] = deque()
        self._is_closing = False

    def attach(self, peer: MemoryTransport, protocol: asyncio.Protocol) -> None:
        """Join the two ends; the protocol is told at once."""
        self._peer, self._protocol = peer, protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        peer = self._peer
        if data and not self._is_closing and peer is not None:
            chunk = bytes(data)
            self._send(lambda: peer.receive(chunk))

    def _send(self, delivery: Callable[[], None]) -> None:
        self._on_the_way.append(delivery)
        self._loop.call_later(self._fabric.latency(self.ours.host, self.theirs.host), self.deliver)

    def deliver(self) -> None:
        """Let what is due arrive, unless the link is held."""
        if self._on_the_way and not self._fabric.is_held(self.ours.host, self.theirs.host):
            self._on_the_way.popleft()()

    def deliver_all(self) -> None:
        """Let everything arrive now: the link was just released."""
        while self._on_the_way and not self._fabric.is_held(self.ours.host, self.theirs.host):
            self._on_the_way.popleft()()

    def receive(self, data: bytes) -> None:
        """Take bytes from the other end."""
        if self._protocol is not None and not self._is_closing:
            self._protocol.data_received(data)

    def lose(self, error: Exception | None) -> None:
        """The connection is over for this end."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            self._is_closing = True
            self._peer = None
            self._fabric.forget(self)
            protocol.connection_lost(error)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            peer = self._peer
            if peer is not None:
                self._send(lambda: peer.lose(None))  # after all bytes before it
            self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        self._on_the_way.clear()
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def __repr__(self) -> str:
        return f"<MemoryTransport {self.ours} -> {self.theirs}>"


class MemoryFabric:
    """All hosts, their listeners, and the links between them. latency: in seconds, from one host to
    another."""

    def __init__(self, latency: Callable[[str, str], float] = lambda source, target: 0.0) -> None:
        self.latency = latency
        self._listeners: dict[Address, CallServer] = {}
        self._names: dict[str, list[str]] = {}
        self._transports: dict[MemoryTransport, None] = {}
        self._held: dict[tuple[str, str], None] = {}
        self._changed = asyncio.Event()
        self._next_port = FIRST_FREE_PORT

    # --- what a network needs

    def listen(self, address: Address, server: CallServer) -> Address:
        """Take an address; port 0 = a free one. Raises OSError: it is taken."""
        if not address.port:
            address = Address(address.host, self.free_port())
        if address in self._listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {address}: the port is in use")
        self._listeners[address] = server
        return address

    def unlisten(self, address: Address, server: CallServer) -> None:
        """Give an address back."""
        if self._listeners.get(address) is server:
            del self._listeners[address]

    def free_port(self) -> int:
        """Return a port that nobody had before."""
        self._next_port += 1
        return self._next_port

    async def connect(self, host: str, address: Address, client: GuardedProtocol) -> None:
        """Connect ``host`` to an address. Raises ConnectionRefusedError; waits while held."""
        while self.is_held(host, address.host) or self.is_held(address.host, host):
            self._changed.clear()
            await self._changed.wait()
        server = self._listeners.get(address)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on {address}")
        ours = Address(host, self.free_port())
        near, far = MemoryTransport(self, ours, address), MemoryTransport(self, address, ours)
        self._transports[near] = self._transports[far] = None
        near.attach(far, client)
        far.attach(near, server.protocol())

    def forget(self, transport: MemoryTransport) -> None:
        """A transport is closed."""
        self._transports.pop(transport, None)

    def addresses_of(self, name: str, port: int) -> list[Address]:
        """Return what a name stands for: what ``set_name`` said, else itself if it is a number or
        anybody listens there."""
        hosts = self._names.get(name)
        if hosts is None:
            is_known = name in _OWN_HOST or any(it.host == name for it in self._listeners)
            hosts = [name] if is_known else []
        return [Address(host, port) for host in sorted(hosts)]

    def is_held(self, source: str, target: str) -> bool:
        """Whether bytes from source to target wait."""
        return (source, target) in self._held

    # --- what a test does

    def set_name(self, name: str, hosts: Sequence[str]) -> None:
        """Let a name stand for hosts, from now on."""
        self._names[name] = list(hosts)

    def hold(self, source: str, target: str) -> None:
        """Keep what travels from one host to another, one way; new connections wait, too."""
        self._held[source, target] = None

    def release(self, source: str, target: str) -> None:
        """Let it arrive, and what follows."""
        self._held.pop((source, target), None)
        self._changed.set()
        for transport in list(self._transports):
            if (transport.ours.host, transport.theirs.host) == (source, target):
                transport.deliver_all()

    def partition(self, one: str, other: str) -> None:
        """Hold both ways."""
        self.hold(one, other)
        self.hold(other, one)

    def heal(self) -> None:
        """Release everything."""
        for source, target in list(self._held):
            self.release(source, target)

    def dialled(self, host: str, listener: str) -> list[MemoryTransport]:
        """Return a host's ends of its connections to another one's doors."""
        ends = [it for it in self._transports if it.ours.host == host]
        return [it for it in ends if it.theirs.host == listener and it.theirs in self._listeners]

    def kill(self, host: str) -> None:
        """Break every connection of a host and forget its listeners, as if its process got SIGKILL.

        What is on its way is lost. The test ends the host's tasks itself.
        """
        for address in [address for address in self._listeners if address.host == host]:
            del self._listeners[address]
        for transport in list(self._transports):
            if host in (transport.ours.host, transport.theirs.host):
                transport.lose(ConnectionResetError(errno.ECONNRESET, f"{host} was killed"))

    @property
    def num_connections(self) -> int:
        """Open connections, counted once each."""
        return (len(self._transports) + 1) // 2


class _MemoryChannel(GuardedChannel):
    def __init__(
        self, fabric: MemoryFabric, host: str, address: Address, limits: ConnectionLimits
    ) -> None:
        super().__init__(address, limits)
        self._fabric = fabric
        self._from = host
        self._to = address

    async def _create_connection(self) -> H2Protocol:
        protocol = self._protocol_factory()
        assert isinstance(protocol, GuardedProtocol)
        await self._fabric.connect(self._from, self._to, protocol)
        return protocol


class MemoryNetwork:
    """One host's view of the fabric. ``at`` gives other hosts theirs; a test that does not care who
    is who may share one."""

    def __init__(
        self,
        fabric: MemoryFabric | None = None,
        *,
        host: str = "localhost",
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.fabric = fabric if fabric is not None else MemoryFabric()
        self.host = host
        # Pings are timed by the real clock, and heartbeats above do their work.
        self._limits = limits or ConnectionLimits(keepalive_s=None)

    def at(self, host: str) -> MemoryNetwork:
        """Return the view of another host on the same fabric."""
        return MemoryNetwork(self.fabric, host=host, limits=self._limits)

    @contextlib.asynccontextmanager
    async def serve(
        self,
        address: Address,
        handlers: Sequence[Any],
        *,
        tls: ServerTls | None = None,
        is_known: IsKnown | None = None,
    ) -> AsyncGenerator[CallServer]:
        """See Network. An empty, wildcard or loopback host is this host; there is no TLS."""
        if tls is not None:
            raise LocalProtocolError("there is no TLS in memory")
        if address.host in _OWN_HOST:
            address = Address(self.host, address.port)
        calls = CallServer(handlers, limits=self._limits, is_known=is_known)
        calls.address = address = self.fabric.listen(address, calls)
        try:
            yield calls
        finally:
            self.fabric.unlisten(address, calls)
            await calls.close()

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncGenerator[GuardedChannel]:
        """See Network."""
        channel = _MemoryChannel(self.fabric, self.host, address, self._limits)
        async with closing(channel):
            yield channel

    async def resolve(self, host: str, port: int) -> list[Address]:
        """See Network."""
        return self.fabric.addresses_of(host, port)
