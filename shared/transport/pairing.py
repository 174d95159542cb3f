"""What both ends of a pair agree on about its endpoint besides the bytes: how long pairing may
take, what is sent to try it, which lanes count as shared memory, and how it is closed."""

from __future__ import annotations

import asyncio

import structlog

from shared.errors import IncompatiblePeer
from shared.transport.base import Endpoint

_log = structlog.get_logger(__name__)

HANDSHAKE_S = 10.0
"""Longest that two workers take to pair up, canaries included."""

CANARY_BYTES = 4 << 20
"""Size of a test frame, if frames may be as large."""

CLOSE_S = 5.0

SHARED_MEMORY = frozenset({"sysv", "posix", "cma", "knem", "xpmem", "cuda_ipc", "loopback"})
"""Lanes within one host. UCX falls back from them to tcp without a word."""


def require_shared_memory(lane: str) -> None:
    """Raises IncompatiblePeer: no part of this lane (``Endpoint.lane``) is shared memory."""
    if SHARED_MEMORY.isdisjoint(part.partition("/")[0] for part in lane.split("+")):
        raise IncompatiblePeer(
            f"KV would move over {lane or 'an unknown lane'}, not through shared memory: run both "
            "workers on one host and in one IPC namespace (compose.yaml has it: ipc: service:ipc), "
            "with sysv in UCX_TLS; or turn require_shared_memory off",
            code="lane",
        )


async def close_endpoint(endpoint: Endpoint) -> None:
    """Close; one that does not is said in the log, and left."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await endpoint.close()
    except TimeoutError:
        _log.error("an endpoint did not close", limit_s=CLOSE_S)
