"""A whole mesh on one machine: starts the three services as processes, waits until they are ready,
restarts what crashes, stops everything.

Behind ``pdmesh up`` and ``pdmesh demo``, and in the tests with real processes. It knows processes
and their cord (``shared/runtime/parent.py``), nothing of their insides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Any

import orjson

from shared.errors import MeshError, WorkerLost
from shared.runtime.groups import plain_errors
from shared.runtime.parent import PARENT_FD

_RESTART_BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
_STOP_LIMIT_S = 10.0


class StartFailed(MeshError):
    """A service could not start; the message is its own last word."""

    type = "start_failed"


class Phase(Enum):
    """Where a process stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(slots=True)
class Service:
    """One process of the mesh."""

    name: str
    module: str
    env: Mapping[str, str]
    phase: Phase = Phase.STARTING
    pid: int = 0
    num_restarts: int = 0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the process said when it was ready: its addresses."""
    error: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None


class LocalMesh:
    """The processes of one local mesh; made by ``local_mesh``."""

    def __init__(self, services: list[Service], log: IO[bytes] | int | None, restart: bool) -> None:
        self.services = services
        self._log = log
        self._restart = restart
        self._stopping = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def gateway(self) -> Service:
        """The gateway's process."""
        return self.services[0]

    @property
    def http_url(self) -> str:
        """Base URL of the gateway's HTTP API, without ``/v1``."""
        return f"http://127.0.0.1:{self.gateway.facts['http_port']}"

    @property
    def grpc_target(self) -> str:
        """host:port of the gateway's gRPC API."""
        return f"127.0.0.1:{self.gateway.facts['grpc_port']}"

    def service(self, name: str) -> Service:
        """Return a process by name, e.g. 'prefill-0'. Raises KeyError."""
        return next(s for s in self.services if s.name == name)

    async def run(self, service: Service) -> None:
        """Keep one process running until ``stop``; its crash is a restart, its failure to start an
        error."""
        for attempt in range(sys.maxsize):
            await self._run_once(service)
            if self._stopping:
                return
            if not self._restart or (attempt == 0 and service.phase is Phase.STARTING):
                service.phase = Phase.FAILED
                service.ready.set()
                self.on_change()
                return
            service.phase = Phase.RESTARTING
            service.num_restarts += 1
            self.on_change()
            await asyncio.sleep(_RESTART_BACKOFF_S[min(attempt, len(_RESTART_BACKOFF_S) - 1)])

    async def _run_once(self, service: Service) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environment = {**os.environ, **service.env, PARENT_FD: str(theirs.fileno())}
        try:
            service.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                service.module,
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
            )
        finally:
            theirs.close()
        service.pid = service.process.pid
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen(service, ours))
                await service.process.wait()
                listener.cancel()
        finally:
            ours.close()
            if service.process.returncode is None:
                service.process.kill()
                await service.process.wait()

    async def _listen(self, service: Service, link: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        received = bytearray()
        while chunk := await loop.sock_recv(link, 4096):
            received += chunk
            while b"\n" in received:
                end = received.index(b"\n")
                facts: dict[str, Any] = orjson.loads(received[:end])
                del received[: end + 1]
                if "error" in facts:
                    service.error = str(facts["error"])
                else:
                    service.facts = facts
                    service.phase = Phase.READY
                    service.ready.set()
                self.on_change()

    async def stop(self) -> None:
        """Stop workers, then the gateway; a process that does not listen is killed after a
        limit."""
        self._stopping = True
        for service in reversed(self.services):
            if service.process is not None and service.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    service.process.send_signal(signal.SIGTERM)
                    service.process.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                for service in self.services:
                    if service.process is not None:
                        await service.process.wait()
        except TimeoutError:
            for service in self.services:
                if service.process is not None and service.process.returncode is None:
                    service.process.kill()
        for service in self.services:
            service.phase = Phase.STOPPED


def plan_services(
    *,
    num_prefill: int,
    num_decode: int,
    env: Mapping[str, str],
    gateway_env: Mapping[str, str],
    prefill_env: Mapping[str, str] | None = None,
    decode_env: Mapping[str, str] | None = None,
) -> list[Service]:
    """Return the processes of a mesh, the gateway first; the workers learn its port when it is
    ready."""
    return [
        Service("gateway", "services.gateway", {**env, **gateway_env}),
        *(
            Service(f"prefill-{i}", "services.prefill", {**env, **(prefill_env or {})})
            for i in range(num_prefill)
        ),
        *(
            Service(f"decode-{i}", "services.decode", {**env, **(decode_env or {})})
            for i in range(num_decode)
        ),
    ]


@contextlib.asynccontextmanager
async def local_mesh(
    services: list[Service],
    *,
    log: Path | None = None,
    restart: bool = True,
    start_limit_s: float = 120.0,
    on_change: Callable[[LocalMesh], None] | None = None,
) -> AsyncGenerator[LocalMesh]:
    """Run the processes for the length of the block; entering waits until every one is ready.

    log: a file that takes all their output; None = this process's stderr.
    Raises StartFailed: one could not start; all others are stopped by then.
    """
    with contextlib.ExitStack() as files:
        sink = files.enter_context(log.open("ab")) if log is not None else sys.stderr.fileno()
        mesh = LocalMesh(services, sink, restart)
        if on_change is not None:
            mesh.on_change = lambda: on_change(mesh)
        files.enter_context(plain_errors())
        async with asyncio.TaskGroup() as tasks:
            try:
                async with asyncio.timeout(start_limit_s):
                    tasks.create_task(mesh.run(mesh.gateway))
                    await _until_ready(mesh.gateway)
                    for worker in mesh.services[1:]:
                        worker.env = {
                            **worker.env,
                            "PDMESH_GATEWAY": f"127.0.0.1:{mesh.gateway.facts['grpc_port']}",
                        }
                        tasks.create_task(mesh.run(worker))
                    for worker in mesh.services[1:]:
                        await _until_ready(worker)
            except TimeoutError:
                waiting = [s.name for s in mesh.services if s.phase is not Phase.READY]
                await mesh.stop()
                raise StartFailed(
                    f"{', '.join(waiting)} not ready after {start_limit_s:g} s"
                ) from None
            except BaseException:
                await mesh.stop()
                raise
            try:
                yield mesh
            finally:
                await mesh.stop()


async def _until_ready(service: Service) -> None:
    await service.ready.wait()
    if service.phase is Phase.FAILED:
        code = service.process.returncode if service.process is not None else None
        raise StartFailed(service.error or f"{service.name} ended with exit code {code}")


async def wait_for_pair(base_url: str, limit_s: float) -> None:
    """Wait until the gateway says that a prefill/decode pair is ready.

    Raises WorkerLost: no pair within the limit; the message says what is missing.
    """
    import aiohttp

    reason = "the gateway did not answer"
    try:
        async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{base_url}/ready") as response:
                        if response.status == 200:
                            return
                        reason = await response.text()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise WorkerLost(
            f"no pair of workers became ready within {limit_s:g} s: {reason}"
        ) from None
