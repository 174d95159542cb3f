"""gRPC over real sockets: the Network of production."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from grpclib.client import Channel
from grpclib.protocol import H2Protocol

from shared.address import Address
from shared.http2.connection import ConnectionLimits, GuardedProtocol, client_protocol
from shared.listening import listen_at
from shared.messages.message_codec import CODEC
from shared.rpc.call_server import CLOSE_WITHIN_S, CallServer, IsKnown
from shared.rpc.tls import GRPC, HANDSHAKE_WITHIN_S, ServerTls


class GuardedChannel(Channel):
    """A channel whose connections have our limits; connects when a call first needs it."""

    def __init__(
        self, address: Address, limits: ConnectionLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            address.host, address.port, codec=CODEC, ssl=tls
        )
        self._limits = limits
        self._dialled: GuardedProtocol | None = None

    def _protocol_factory(self) -> H2Protocol:
        self._dialled = client_protocol(self._limits)
        return self._dialled

    async def _create_connection(self) -> H2Protocol:
        # A name that does not resolve fails here: uvloop, cancelled amid a connection, would leave
        # that failure to nobody, who logs it as a bug.
        loop = asyncio.get_running_loop()
        await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        try:
            return await super()._create_connection()
        except BaseException:
            # uvloop, cancelled amid a connection that is made, closes it and tells nobody: it
            # would be written to, and pinged.
            if self._dialled is not None and hasattr(self._dialled, "processor"):
                self._dialled.abort()
                self._dialled.connection_lost(None)
            raise

    @property
    def current(self) -> GuardedProtocol | None:
        """The connection in use, if there is one."""
        protocol = self._protocol
        return protocol if isinstance(protocol, GuardedProtocol) else None


@contextlib.asynccontextmanager
async def closing(channel: GuardedChannel) -> AsyncGenerator[GuardedChannel]:
    """Close the channel when the block ends, and wait until its connection is gone."""
    try:
        yield channel
    finally:
        protocol = channel.current
        if protocol is not None:
            channel.close()
            try:
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await protocol.closed.wait()
            except TimeoutError:
                protocol.abort()


class TcpNetwork:
    """Serves and dials on TCP. client_tls: how what we dial is encrypted; None = not at all."""

    def __init__(
        self,
        *,
        limits: ConnectionLimits | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits or ConnectionLimits()
        self._client_tls = client_tls

    @contextlib.asynccontextmanager
    async def serve(
        self,
        address: Address,
        handlers: Sequence[Any],
        *,
        tls: ServerTls | None = None,
        is_known: IsKnown | None = None,
    ) -> AsyncGenerator[CallServer]:
        calls = CallServer(handlers, limits=self._limits, is_known=is_known)
        listener = await listen_at(
            calls.protocol,
            address.host,
            address.port,
            ssl=tls and tls.context(GRPC),
            ssl_handshake_timeout=tls and HANDSHAKE_WITHIN_S,
        )
        host, port, *_ = listener.sockets[0].getsockname()
        calls.address = Address(host, port)
        try:
            yield calls
        finally:
            # New connections first, then those that there are: none may come in between.
            listener.close()
            await calls.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await listener.wait_closed()

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncGenerator[GuardedChannel]:
        async with closing(GuardedChannel(address, self._limits, self._client_tls)) as channel:
            yield channel

    async def resolve(self, host: str, port: int) -> list[Address]:
        """See Network. Of a name with addresses of both families only the IPv4 ones count: they
        lead to the same hosts, and a gateway must not be joined twice."""
        if "%" in host:  # an address already, whose zone uvloop would forget
            return [Address(host, port)]
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError:
            return []
        found: dict[int, dict[str, None]] = {}
        for family, _, _, _, sockaddr in infos:
            found.setdefault(family, {})[str(sockaddr[0])] = None
        hosts = found.get(socket.AF_INET) or found.get(socket.AF_INET6) or {}
        return [Address(name, port) for name in sorted(hosts)]
