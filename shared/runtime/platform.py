"""What a service takes from the world outside: network, data plane, compute, randomness.

One record, injected into ``Gateway`` and ``MeshWorker``, so that the whole mesh can run in
one process under virtual time. Tests give ``MemoryNetwork``, the loopback transport and inline
compute. The gateway needs only ``network`` and ``random_bytes``; the module that a worker starts
from brings the factories of its transport and compute, so that nothing here reaches torch or ucxx.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shared.errors import LocalProtocolError
from shared.ids import Incarnation, RandomBytes
from shared.membership.mesh_network import MeshNetwork
from shared.mesh_secret import MeshSecret
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.rpc.network import Network
from shared.rpc.tls import MeshTls
from shared.runtime.loops import loop_time

if TYPE_CHECKING:
    # The gateway imports this module; its image has neither an engine nor a transport.
    from shared.engine.base import Engine
    from shared.engine.work_thread import OrderedWork
    from shared.engine.worker import ComputeFactory, ComputeRunner
    from shared.transport.base import Transport, TransportFactory

    Profiler = Callable[[Engine, ComputeRunner, Transport], Awaitable[MachineProfile]]


def _none(*_: object) -> NoReturn:
    raise LocalProtocolError("this process was given no transport, no compute and no threads")


async def _unmeasured(
    engine: Engine, compute: ComputeRunner, transport: Transport
) -> MachineProfile:
    return UNMEASURED


@dataclass(frozen=True, slots=True)
class Platform:
    """The outside world of one process.

    new_transport: opens the process's data plane; called once. compute: makes the runner of an
    engine; called once an engine. stopwatch: seconds, for measuring only; whatever is decided goes
    by the loop's clock. secret: the mesh's; None = it has none. between: the network between
    services; None = ``network``. profile: what this machine can do,
    awaited before a worker's first step. new_thread: does work in order, beside the loop.
    """

    network: Network
    new_transport: TransportFactory = _none
    compute: ComputeFactory = _none
    random_bytes: RandomBytes = os.urandom
    stopwatch: Callable[[], float] = loop_time
    secret: MeshSecret | None = None
    between: Network | None = None
    profile: Profiler = _unmeasured
    new_thread: Callable[[str], OrderedWork] = _none

    def mesh_network(self, role: str, incarnation: Incarnation) -> Network:
        """Return the network between services, where this process is a gateway, prefill or decode.
        Where the mesh has a secret it begins every connection with a proof."""
        below = self.between or self.network
        if self.secret is None:
            return below
        return MeshNetwork(
            below, self.secret, self.random_bytes, role=role, incarnation=incarnation
        )


def real_platform(secret: MeshSecret | None = None, tls: MeshTls | None = None) -> Platform:
    """Return the platform of production, all of it for a gateway: sockets and the system's random
    bytes. tls: between services."""
    from shared.membership.mesh_tls import ServiceNetwork
    from shared.rpc.tcp import TcpNetwork

    return Platform(
        TcpNetwork(), stopwatch=time.perf_counter, secret=secret, between=ServiceNetwork(tls)
    )
