"""A prefill or decode worker as a process: engine, platform, signals, exit code. Knows no role."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import cast

from shared.address import Address
from shared.config import WorkerConfig
from shared.engine.base import Engine
from shared.engine.load import load_engine
from shared.engine.memory.resident import Resident
from shared.engine.work_thread import WorkThread, run_and_end
from shared.engine.worker import ComputeRunner, ThreadCompute
from shared.mesh_secret import MeshSecret, mesh_secret
from shared.profile.kept import KeptProfile, find_or_measure, key_of
from shared.profile.machine import MachineProfile
from shared.profile.measure import is_outdone, measure
from shared.profile.measure_steps import fitted_profile, measure_steps
from shared.profile.step_profile import StepProfile
from shared.rpc.tls import MeshTls
from shared.runtime import realtime
from shared.runtime.platform import Platform, real_platform
from shared.runtime.realtime import RealTime
from shared.runtime.service import Process, run_service
from shared.settings import role_of
from shared.transport.base import Transport, TransportFactory
from shared.transport.ucxx import open_ucx
from shared.worker.launch import LaunchProfile
from shared.worker.life import devices
from shared.worker.worker import MeshWorker

SWITCH_INTERVAL_S = 0.0005


def run_worker(config: WorkerConfig, launch: LaunchProfile) -> int:
    """Run one worker as this process until a signal, and return the exit code (``service.py``).

    Logs must be configured. Whatever keeps it from starting or ends it is one line on stderr.
    """

    async def main(process: Process) -> bool:
        secret, tls = mesh_secret(config, os.environ), MeshTls.of(config)
        async with _machinery(config, secret, tls, process.begins) as (engine, platform):

            def ready(address: Address) -> None:
                process.ready(grpc_port=address.port, num_blocks=engine.num_blocks)

            return await MeshWorker(config, launch, platform, engine).run(ready, process.stop)

    name = role_of(type(config))
    return run_service(name, main, drain_s=config.drain_s, is_realtime=config.realtime)


async def profile_machine(config: WorkerConfig, *, is_forced: bool) -> KeptProfile:
    """Do what a prefill worker does at its start and no more: load, then find or measure what this
    machine can do. is_forced: measure in any case.

    Raises ModelError, EngineFailed: see ``load_engine``. TransferFailed: UCX does not start.
    """
    async with _machinery(config) as (engine, platform), devices(platform, engine) as opened:
        return await _profile(config, engine, *opened, is_forced=is_forced)


async def profile_steps(config: WorkerConfig, *, limit_s: float) -> StepProfile:
    """Time steps of all sizes that this machine can run, for ``limit_s`` or a little longer, and
    return the lines through them.

    Raises ModelError, EngineFailed: see ``load_engine``; or steps follow no line. TransferFailed:
    UCX does not start. InvalidRequest: too little could be measured.
    """
    async with _machinery(config) as (engine, platform), devices(platform, engine) as opened:
        compute, _ = opened
        steps = await measure_steps(engine, compute, time.perf_counter, limit_s=limit_s)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return fitted_profile(steps, engine, date=today)


@contextlib.asynccontextmanager
async def _machinery(
    config: WorkerConfig,
    secret: MeshSecret | None = None,
    tls: MeshTls | None = None,
    begins: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[tuple[Engine, Platform]]:
    """Load the engine and make the platform that it runs on, for the length of the block.

    begins: told of each slow part.
    """
    # The compute thread holds the GIL between its kernels: the loop asks for it ten times sooner
    # than Python's 5 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def carry() -> None:
        if config.realtime:
            realtime.take(RealTime.CARRIER)

    # Loading holds the thread for seconds; signals are heard meanwhile.
    engine = await run_and_end("pdmesh-load", lambda: load_engine(config, begins))
    resident = Resident(engine.pool_arrays())
    try:
        resident.start()
        begins("opening UCX")

        def enter_pump() -> None:
            engine.enter_thread()
            carry()

        async def profile(
            engine: Engine, compute: ComputeRunner, transport: Transport
        ) -> MachineProfile:
            return (await _profile(config, engine, compute, transport, begins)).profile

        # Its operations are narrower than the protocol says: it takes its own endpoints only.
        new_transport = cast(
            "TransportFactory", functools.partial(open_ucx, prepare_thread=enter_pump)
        )
        compute = functools.partial(ThreadCompute, enter_copies=carry)
        yield (
            engine,
            replace(
                real_platform(secret, tls),
                new_transport=new_transport,
                compute=compute,
                profile=profile,
                new_thread=WorkThread,
            ),
        )
    finally:
        # First: its thread touches the memory that the engine gives back.
        resident.close()
        engine.close()


async def _profile(
    config: WorkerConfig,
    engine: Engine,
    compute: ComputeRunner,
    transport: Transport,
    begins: Callable[[str], None] = lambda _: None,
    *,
    is_forced: bool = False,
) -> KeptProfile:
    most_tokens = config.max_step_tokens

    async def measure_now() -> MachineProfile:
        begins("measuring this machine")
        return await measure(engine, compute, transport, time.perf_counter, most_tokens=most_tokens)

    async def holds(found: MachineProfile) -> bool:
        return not is_forced and not await is_outdone(
            engine, compute, time.perf_counter, found.samples
        )

    return await find_or_measure(
        key_of(engine, most_tokens), measure_now, path=config.profile_file, holds=holds
    )
