"""The network between services, below the proof of the mesh's secret: TCP, with TLS at every door
of the mesh and certificates at both ends where ``--mesh-tls-cert`` says so; and a sentence for ends
that do not fit.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from shared.address import Address
from shared.errors import MeshError, NotOfThisMesh, WorkerLost
from shared.rpc.call_server import CallServer
from shared.rpc.tcp import GuardedChannel, TcpNetwork
from shared.rpc.tls import MeshTls

_REMEDY = (
    "give all services of a mesh --mesh-tls-cert, --mesh-tls-key and --mesh-tls-ca, with "
    "certificates of one authority that are valid now, or none of them"
)


class ServiceNetwork:
    """A ``Network`` of the services of one mesh. tls: None = without."""

    def __init__(self, tls: MeshTls | None) -> None:
        self._tls = tls

    def serve(
        self, address: Address, handlers: Sequence[Any], **options: Any
    ) -> AbstractAsyncContextManager[CallServer]:
        """See Network. options: of ``TcpNetwork``, TLS aside."""
        return TcpNetwork().serve(address, handlers, tls=self._tls, **options)

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncGenerator[GuardedChannel]:
        """See Network. What breaks in the block because the two ends have not the same TLS is
        NotOfThisMesh, or WorkerLost where it could be another trouble."""
        network = TcpNetwork(client_tls=self._tls and self._tls.to_dial())
        async with network.channel(address) as channel:
            try:
                yield channel
            except WorkerLost as error:
                explained = self._explained(error, address, channel)
                if explained is None:
                    raise
                raise explained from error

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await TcpNetwork().resolve(host, port)

    def _explained(
        self, error: WorkerLost, address: Address, channel: GuardedChannel
    ) -> MeshError | None:
        failure, protocol = error.__cause__, channel.current
        if isinstance(failure, ssl.SSLCertVerificationError):
            reason = f"this process does not trust its certificate ({failure.verify_message})"
        elif isinstance(failure, ssl.SSLError) and not isinstance(failure, ssl.SSLEOFError):
            reason = f"there is no TLS with it ({failure.reason})"
        elif protocol is None or protocol.has_heard or not protocol.closed.is_set():
            return None
        elif self._tls is None:
            # Proxies before a gateway that restarts do this, too: it may pass.
            hint = f"it hung up without a word; if it has TLS, {_REMEDY}"
            return WorkerLost(f"{address}: {hint}", code="no_word")
        else:
            # In TLS 1.3 the listener judges after the dialler is done, and asyncio tells no reason.
            reason = "it hung up when it saw this process's certificate"
        return NotOfThisMesh(f"{address}: {reason}; {_REMEDY}", code="other_tls")
