"""A whole mesh on one machine: starts the three services as processes, waits until they are ready,
restarts what crashes, stops everything.

Behind ``pdmesh up`` and ``pdmesh demo``, and in the tests with real processes. It knows processes
and their cord (``shared/runtime/parent.py``), nothing of their insides.

    async with local_mesh(plan_services(...), log=path) as mesh:
        await wait_for_pair(mesh.http_url, limit_s=30.0)
        ...

Every process hangs on a cord of its own, so that none outlives this one, however this one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from shared.address import Address
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.errors import MeshError, WorkerLost
from shared.mesh_secret import SECRET_VARIABLE, new_secret
from shared.runtime.child import child_process
from shared.runtime.groups import TaskGroup, plain_errors
from shared.settings import environment_of, role_of

RESTART_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the restarts of a process that keeps crashing; the last one repeats."""

START_LIMIT_S = 600.0
"""Within which all processes must be ready."""

STEADY_AFTER_S = 60.0
"""After a life of so long the pauses begin anew."""

DRAIN_GRACE_S = 15.0
"""Beyond the drain limit, which the process keeps by itself, until it is killed."""

STOP_LIMIT_S = 10.0
"""A worker without a gateway has nothing in hand."""

LAST_WORDS_S = 1.0
"""Longest wait for the end of a dead process's cord."""

READY_POLL_S = 0.05
"""HTTP has no event for readiness."""


class StartFailed(MeshError):
    """A service could not start; the message is its own last word."""

    type = "start_failed"


class Phase(Enum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class Service:
    """One process of the mesh.

    env: what it gets beside our own environment. facts: what it said when it was ready (its
    ports). part: of its start, which it is at. is_added: the mesh ran before it. is_retired: it
    ends for good. error: its last word, '' if it had none.
    """

    name: str
    module: str
    env: dict[str, str]
    phase: Phase = Phase.WAITING
    num_restarts: int = 0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    part: str = ""
    is_added: bool = False
    is_retired: bool = False
    error: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 before the first run."""
        return self.process.pid if self.process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Of the last run, None while it lasts; negative = the signal."""
        return self.process.returncode if self.process is not None else None

    def end(self, *, at_once: bool) -> None:
        """Ask a running process to drain, or kill it: at once, or because it is not ready and has
        nothing to drain."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if at_once or self.phase is not Phase.READY:
                process.kill()
            else:
                self.phase = Phase.STOPPING
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process hears nothing else


def plan_services(
    gateway: GatewayConfig, prefill: Sequence[PrefillConfig], decode: Sequence[DecodeConfig]
) -> list[Service]:
    """Return the processes of a mesh, the gateway first. The workers' ``gateway`` is filled in when
    its port is known. A mesh that is given no secret gets one of its own: another on this machine
    is another mesh."""
    services = [Service(name="gateway", module="services.gateway", env=environment_of(gateway))]
    for config in (*prefill, *decode):
        services.append(one_more(services, config))
    if gateway.mesh_secret_file is None and not os.environ.get(SECRET_VARIABLE, "").strip():
        secret = new_secret(secrets.token_bytes)
        for service in services:
            service.env[SECRET_VARIABLE] = secret
    return services


def one_more(services: Sequence[Service], config: PrefillConfig | DecodeConfig) -> Service:
    """Return one more process of a mesh, with a name and ports of its own, and the others'
    secret."""
    role = role_of(type(config))
    is_colocated = isinstance(config, DecodeConfig) and config.colocated
    kind = "worker" if config.movable else "colocated" if is_colocated else role
    names = {service.name for service in services}
    name = next(it for num in count() if (it := f"{kind}-{num}") not in names)
    secrets_env = {it: services[0].env[it] for it in (SECRET_VARIABLE,) if it in services[0].env}
    env = {**environment_of(config), **secrets_env}
    return Service(name=name, module=f"services.{role}", env=env)


@dataclass(slots=True, eq=False)
class LocalMesh:
    """The processes of one local mesh; made by ``local_mesh``, which says what the others are."""

    services: list[Service]
    _log_fd: int
    _restart: bool
    _drain_s: float
    _on_change: Callable[[LocalMesh], None]
    _on_wish: Callable[[LocalMesh, dict[str, Any]], None]
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    _tasks: asyncio.TaskGroup | None = None
    _targets: str = ""

    @property
    def gateway(self) -> Service:
        return self.services[0]

    @property
    def workers(self) -> list[Service]:
        """All processes but the gateway's."""
        return self.services[1:]

    @property
    def http_url(self) -> str:
        """Base URL of the gateway's HTTP API, without ``/v1``."""
        scheme = "https" if self.gateway.env.get("PDMESH_TLS_CERT") else "http"
        address = Address(self._reached("PDMESH_HOST"), self.gateway.facts["http_port"])
        return f"{scheme}://{address}"

    @property
    def ready_url(self) -> str:
        """Base URL at which /ready answers without a client's certificate."""
        watched = self.gateway.facts.get("metrics_address")
        return f"http://{watched}" if watched else self.http_url

    @property
    def grpc_target(self) -> str:
        """host:port of the gateway's gRPC API."""
        return str(Address(self._reached("PDMESH_HOST"), self.gateway.facts["grpc_port"]))

    def _reached(self, variable: str) -> str:
        """Return where this machine reaches a gateway that listens on what the variable says."""
        host = self.gateway.env.get(variable, "") or "127.0.0.1"
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all in ``tasks``, which a failure to start ends, and wait until all are ready.

        Raises StartFailed: the limit came first.
        """
        try:
            async with asyncio.timeout(START_LIMIT_S):
                self._keep(self.gateway, tasks)
                await self.gateway.ready.wait()
                # Whatever restarts finds the others where they were.
                facts = self.gateway.facts
                self.gateway.env["PDMESH_HTTP_PORT"] = str(facts["http_port"])
                self.gateway.env["PDMESH_GRPC_PORT"] = str(facts["grpc_port"])
                self.gateway.env["PDMESH_MESH_PORT"] = str(facts["mesh_port"])
                mesh_host = self._reached("PDMESH_MESH_HOST")
                # Several gateway processes are joined each at a port of its own.
                ports = facts.get("mesh_ports", [facts["mesh_port"]])
                self._targets = ",".join(str(Address(mesh_host, port)) for port in ports)
                self._tasks = tasks
                for worker in self.workers:
                    worker.env["PDMESH_GATEWAY"] = self._targets
                    self._keep(worker, tasks)
                for worker in self.workers:
                    await worker.ready.wait()
        except TimeoutError:
            names = ", ".join(s.name for s in self.services if not s.ready.is_set())
            raise StartFailed(f"not ready after {START_LIMIT_S:g} s: {names}") from None

    async def stop(self) -> None:
        """Stop the gateway, then the workers: what it has in hand needs them. Whatever does not end
        in time is killed; all are reaped."""
        self._stopping.set()
        await self._end([self.gateway], self._drain_s + DRAIN_GRACE_S)
        await self._end(self.workers, STOP_LIMIT_S)

    def add(self, worker: Service) -> None:
        """Start one more worker while the mesh runs. If it cannot start, the others go on."""
        assert self._tasks is not None
        worker.env["PDMESH_GATEWAY"], worker.is_added = self._targets, True
        self.services.append(worker)
        self._keep(worker, self._tasks)

    def forget(self, worker: Service) -> None:
        """A worker is no part of the mesh any more."""
        self.services.remove(worker)
        self._on_change(self)

    def retire(self, worker: Service) -> None:
        """Have a worker finish what it holds, and end for good."""
        worker.is_retired = True
        worker.end(at_once=False)
        self._on_change(self)

    def kill(self) -> None:
        """End all at once, without a drain; ``stop`` then returns at once, too."""
        self._stopping.set()
        for service in self.services:
            service.end(at_once=True)

    def _keep(self, service: Service, tasks: asyncio.TaskGroup) -> None:
        self._keepers[service.name] = tasks.create_task(
            self._keep_running(service), name=service.name
        )

    async def _keep_running(self, service: Service) -> None:
        loop = asyncio.get_running_loop()
        num_crashes = 0
        try:
            while True:
                started_at = loop.time()
                try:
                    await self._run_once(service)
                except OSError as error:  # no memory, descriptors or process ids for one more
                    service.error = f"its process cannot be started: {error.strerror}"
                if self._stopping.is_set() or service.is_retired:
                    return
                self._enter(service, Phase.CRASHED)
                # Never unset: this is a first start that failed. A later one is tried again.
                if not service.ready.is_set():
                    if service.is_added:
                        return
                    raise StartFailed(f"{service.name} could not start: {last_word(service)}")
                if not self._restart:
                    return
                if loop.time() - started_at > STEADY_AFTER_S:
                    num_crashes = 0
                pause_s = RESTART_BACKOFF_S[min(num_crashes, len(RESTART_BACKOFF_S) - 1)]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                        return
                num_crashes += 1
                service.num_restarts += 1
        finally:
            if service.phase is not Phase.CRASHED:
                self._enter(service, Phase.STOPPED)
            if service.is_retired:
                self.forget(service)

    async def _run_once(self, service: Service) -> None:
        """Start the process and return when it has ended and is reaped."""
        service.part, service.error = "", ""
        async with child_process(service.module, service.env, self._log_fd) as (process, words):
            service.process = process
            self._enter(service, Phase.STARTING)
            # ``_end`` came while it was being started, and had no process to end.
            if self._stopping.is_set():
                process.kill()
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(self._listen(service, words))
                await process.wait()
                await asyncio.wait([listener], timeout=LAST_WORDS_S)
                listener.cancel()

    async def _listen(self, service: Service, words: AsyncIterable[dict[str, Any]]) -> None:
        async for facts in words:
            if "error" in facts:
                service.error = str(facts["error"])
            elif "part" in facts:
                service.part = str(facts["part"])
                self._on_change(self)
            elif "planner" in facts:
                self._on_wish(self, facts["planner"])
            elif service.phase is Phase.STARTING:
                service.facts = facts
                service.ready.set()
                self._enter(service, Phase.READY)

    def _enter(self, service: Service, phase: Phase) -> None:
        service.phase = phase
        self._on_change(self)

    async def _end(self, services: Sequence[Service], limit_s: float) -> None:
        for service in services:
            service.end(at_once=False)
        self._on_change(self)
        keepers = [self._keepers[s.name] for s in services if s.name in self._keepers]
        if not keepers:
            return
        _, late = await asyncio.wait(keepers, timeout=limit_s)
        if late:
            for service in services:
                service.end(at_once=True)
            await asyncio.wait(late)


@contextlib.asynccontextmanager
async def local_mesh(
    services: list[Service],
    *,
    log: Path | None = None,
    restart: bool = True,
    drain_s: float = 30.0,
    on_change: Callable[[LocalMesh], None] = lambda mesh: None,
    on_wish: Callable[[LocalMesh, dict[str, Any]], None] = lambda mesh, wish: None,
) -> AsyncGenerator[LocalMesh]:
    """Run the processes for the length of the block; entering waits until every one is ready.

    log: a file that takes all their output; None = this process's stderr. drain_s: longest wait,
    at the end, for requests in hand. on_change: called at every change of a phase or part, the
    first time before anything is started. on_wish: called with what the gateway's planner wants.
    Raises StartFailed: one could not start; all others are stopped by then.
    """
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("ab")) if log is not None else sys.stderr
        mesh = LocalMesh(services, sink.fileno(), restart, drain_s, on_change, on_wish)
        on_change(mesh)
        stack.enter_context(plain_errors())
        async with TaskGroup() as tasks:
            try:
                await mesh.start(tasks)
                yield mesh
            finally:
                await mesh.stop()


async def wait_for_pair(base_url: str, limit_s: float) -> None:
    """Wait until the gateway says that a prefill/decode pair is ready.

    Raises WorkerLost: no pair within the limit; the message says what is missing.
    """
    import aiohttp

    reason = "the gateway does not answer"
    try:
        async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    # Our own child, asked for no secret: whose certificate it shows is no matter.
                    async with session.get(f"{base_url}/ready", ssl=False) as response:
                        if response.status == 200:
                            return
                        body = orjson.loads(await response.read())
                        reason = str(body.get("reason", body))
                await asyncio.sleep(READY_POLL_S)
    except TimeoutError:
        raise WorkerLost(
            f"no pair of workers became ready within {limit_s:g} s: {reason}"
        ) from None


def last_word(service: Service) -> str:
    """Return why the process's last run ended: its own word, else what its exit code tells."""
    if service.error:
        return service.error
    code = service.exit_code or 0
    if code >= 0:
        return f"ended with exit code {code}; its log says why"
    name = signal.Signals(-code).name
    return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
