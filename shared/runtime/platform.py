"""What a service takes from the world outside: network, data plane, compute, randomness.

One record, injected into ``serve_gateway``, ``serve_prefill`` and ``serve_decode``, so that the
whole mesh can run in one process under virtual time. Tests give ``MemoryNetwork``, the loopback
transport and inline compute. The gateway needs only ``network`` and ``random_bytes``; the module
that a worker starts from brings the factories of its transport and compute, so that nothing here
reaches torch or ucxx.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shared.errors import LocalProtocolError
from shared.ids import RandomBytes
from shared.rpc.network import Network

if TYPE_CHECKING:
    # The gateway imports this module; its image has neither an engine nor a transport.
    from shared.engine.worker import ComputeFactory
    from shared.transport.base import TransportFactory


async def _no_transport() -> NoReturn:
    raise LocalProtocolError("this process was given no transport")


def _no_compute(engine: Any) -> NoReturn:
    raise LocalProtocolError("this process was given no compute runner")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Platform:
    """The outside world of one process.

    new_transport: opens the process's data plane; called once. compute: makes the runner of an
    engine; called once an engine. stopwatch: seconds, for measuring only; whatever is decided goes
    by the loop's clock.
    """

    network: Network
    new_transport: TransportFactory = _no_transport
    compute: ComputeFactory = _no_compute
    random_bytes: RandomBytes = secrets.token_bytes
    stopwatch: Callable[[], float] = _loop_time


def real_platform(
    *, new_transport: TransportFactory = _no_transport, compute: ComputeFactory = _no_compute
) -> Platform:
    """Return the platform of production: sockets and the system's random bytes."""
    from shared.rpc.tcp import TcpNetwork

    return Platform(TcpNetwork(), new_transport, compute, stopwatch=time.perf_counter)
