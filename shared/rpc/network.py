"""How processes find each other's gRPC services: the seam between real sockets and a mesh in one
process.

``TcpNetwork`` (tcp.py) is production; ``MemoryNetwork`` of the tests carries the same HTTP/2 bytes
through memory, so that the whole mesh can run in one process under virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shared.address import Address as Address
from shared.rpc.tls import ServerTls

IsKnown = Callable[[Any], bool]
"""Whether a connection (``ServerStream.connection``) is somebody's that we know."""


class RpcServer(Protocol):
    """A listening gRPC server."""

    @property
    def address(self) -> Address:
        """Where it listens, with the real port if 0 was asked for."""
        ...

    def set_ready(self, is_ready: bool) -> None:
        """What health checks hear: SERVING (from the start) or NOT_SERVING."""
        ...

    async def drain(self, limit_s: float) -> bool:
        """Refuse new calls with ShuttingDown, wait for running ones; False if the limit came first.

        Long-lived sessions count as running: end them first. The block that serves then closes.
        """
        ...


class Network(Protocol):
    """Serves and dials gRPC."""

    def serve(
        self,
        address: Address,
        handlers: Sequence[Any],
        *,
        tls: ServerTls | None = None,
        is_known: IsKnown | None = None,
    ) -> AbstractAsyncContextManager[RpcServer]:
        """Serve handlers (objects with grpclib's ``__mapping__``) until the block ends; health and
        reflection are added. is_known: a connection that it does not hold for known 10 s after
        its beginning is closed (``KNOWN_WITHIN_S``); None = all are known.

        Raises OSError: the port is in use. InvalidRequest: a file of ``tls`` is unusable.
        """
        ...

    def channel(self, address: Address) -> AbstractAsyncContextManager[Any]:
        """A grpclib Channel to the address; closed when the block ends."""
        ...

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Every address behind a name, sorted; empty if the name is not known now."""
        ...
