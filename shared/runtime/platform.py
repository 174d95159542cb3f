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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shared.errors import LocalProtocolError
from shared.ids import RandomBytes
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.rpc.network import Network

if TYPE_CHECKING:
    # The gateway imports this module; its image has neither an engine nor a transport.
    from shared.engine.base import Engine
    from shared.engine.worker import ComputeFactory, ComputeRunner
    from shared.transport.base import Transport, TransportFactory

    Profiler = Callable[[Engine, ComputeRunner, Transport], Awaitable[MachineProfile]]


async def _no_transport() -> NoReturn:
    raise LocalProtocolError("this process was given no transport")


def _no_compute(engine: Any) -> NoReturn:
    raise LocalProtocolError("this process was given no compute runner")


async def _unmeasured(
    engine: Engine, compute: ComputeRunner, transport: Transport
) -> MachineProfile:
    return UNMEASURED


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Platform:
    """The outside world of one process.

    new_transport: opens the process's data plane; called once. compute: makes the runner of an
    engine; called once an engine. stopwatch: seconds, for measuring only; whatever is decided goes
    by the loop's clock. profile: what this machine can do, awaited before a worker's first step.
    """

    network: Network
    new_transport: TransportFactory = _no_transport
    compute: ComputeFactory = _no_compute
    random_bytes: RandomBytes = secrets.token_bytes
    stopwatch: Callable[[], float] = _loop_time
    profile: Profiler = _unmeasured


def real_platform(
    *,
    new_transport: TransportFactory = _no_transport,
    compute: ComputeFactory = _no_compute,
    profile: Profiler = _unmeasured,
) -> Platform:
    """Return the platform of production: sockets and the system's random bytes."""
    from shared.rpc.tcp import TcpNetwork

    stopwatch = time.perf_counter
    return Platform(TcpNetwork(), new_transport, compute, stopwatch=stopwatch, profile=profile)
