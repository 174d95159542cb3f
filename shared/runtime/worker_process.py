"""A prefill or decode worker as a process: engine, platform, signals, exit code. Knows no role."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from shared.address import Address
from shared.config import WorkerConfig
from shared.engine.base import Engine
from shared.engine.load import load_engine
from shared.engine.resident import Resident
from shared.engine.worker import ThreadCompute
from shared.runtime import realtime
from shared.runtime.platform import Platform, real_platform
from shared.runtime.realtime import RealTime
from shared.runtime.service import Process, run_configured, run_service
from shared.transport.base import TransportFactory
from shared.transport.ucxx import open_ucx

Config = TypeVar("Config", bound=WorkerConfig, contravariant=True)
AnyConfig = TypeVar("AnyConfig", bound=WorkerConfig)


SWITCH_INTERVAL_S = 0.0005


class Serve(Protocol[Config]):
    """``serve_prefill`` or ``serve_decode``."""

    async def __call__(
        self,
        config: Config,
        platform: Platform,
        engine: Engine,
        ready: Callable[[Address], None],
        stop: asyncio.Event | None = None,
    ) -> bool: ...


def run_worker(name: str, serve: Serve[AnyConfig], config: AnyConfig) -> int:
    """Run one worker as this process until a signal, and return the exit code (``service.py``).

    Logs must be configured. Whatever keeps it from starting or ends it is one line on stderr.
    """

    # The compute thread holds the GIL between its kernels: the loop asks for it ten times sooner
    # than Python's 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def carry() -> None:
        if config.realtime:
            realtime.take(RealTime.CARRIER)

    async def main(process: Process) -> bool:
        # Loading holds the thread for seconds; signals are heard meanwhile.
        engine = await asyncio.to_thread(load_engine, config, process.begins)
        resident = Resident(engine.pool_arrays())
        try:
            resident.start()
            process.begins("opening UCX")

            def enter_pump() -> None:
                engine.enter_thread()
                carry()

            # Its operations are narrower than the protocol says: it takes its own endpoints only.
            new_transport = cast(
                "TransportFactory", functools.partial(open_ucx, prepare_thread=enter_pump)
            )
            compute = functools.partial(ThreadCompute, enter_copies=carry)
            platform = real_platform(new_transport=new_transport, compute=compute)

            def ready(address: Address) -> None:
                process.ready(grpc_port=address.port, num_blocks=engine.num_blocks)

            return await serve(config, platform, engine, ready, process.stop)
        finally:
            resident.close()
            engine.close()

    return run_service(name, main, drain_s=config.drain_s, is_realtime=config.realtime)


def run_worker_from_environment(name: str, serve: Serve[AnyConfig], kind: type[AnyConfig]) -> int:
    """``run_worker`` with the configuration of ``PDMESH_*``; sets logging up, too."""
    return run_configured(name, kind, lambda config: run_worker(name, serve, config))
