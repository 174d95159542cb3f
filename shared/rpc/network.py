"""How processes find each other's gRPC services: the seam between real sockets and a mesh in one
process.

``TcpNetwork`` (tcp.py) is production; ``MemoryNetwork`` of the tests carries the same HTTP/2 bytes
through memory, so that the whole mesh can run in one process under virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from shared.address import Address
from shared.rpc.call_server import CallServer, IsKnown
from shared.rpc.tls import ServerTls


class Network(Protocol):
    """Serves and dials gRPC."""

    def serve(
        self,
        address: Address,
        handlers: Sequence[Any],
        *,
        tls: ServerTls | None = None,
        is_known: IsKnown | None = None,
    ) -> AbstractAsyncContextManager[CallServer]:
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
