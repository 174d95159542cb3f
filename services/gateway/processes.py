"""Several gateway processes on one HTTP port: a small parent that starts, replaces and stops them.

    pdmesh gateway --gateway-processes 3
        clients ── port 8000, dealt out by the kernel ── process 0: workers join at 8200
                                                         process 1: workers join at 8201
                                                         process 2: workers join at 8202

Each process is a whole gateway with an incarnation of its own, so workers must join every one:
``--gateway host:8200,host:8201,host:8202``. A process that dies is replaced, with a log line; the
others go on meanwhile. Before all are ready the first failure ends everything. Every process hangs
on a cord (``shared/runtime/parent.py``): none outlives the parent, however that dies. The parent
serves nothing and loads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from shared.address import Address, parse_address
from shared.config import GatewayConfig
from shared.errors import MeshError
from shared.runtime.child import child_process
from shared.runtime.groups import TaskGroup, plain_errors
from shared.runtime.service import GRACE_S, Process, run_service
from shared.settings import environment_of

RESTART_AFTER_S = 0.5
"""Before a process that died is replaced: one that dies at once must not fill the log."""

_log = structlog.get_logger(__name__)


class ProcessFailed(MeshError):
    """A gateway process could not start; the message is its own last word."""

    type = "start_failed"


def run_gateways(config: GatewayConfig) -> int:
    """Run ``config.gateway_processes`` gateways below this process until a signal, and return the
    exit code (``service.py``): that of the process which ended worst."""
    codes: list[int] = []

    async def main(process: Process) -> bool:
        numbers = range(config.gateway_processes)
        children = [_Child(number, config, process.tell) for number in numbers]
        with plain_errors():
            async with TaskGroup() as tasks:
                await _start(children, tasks)
                process.ready(
                    **children[0].facts,
                    mesh_ports=[child.facts["mesh_port"] for child in children],
                )
                await process.stop.wait()
                for child in children:
                    child.stop()
        codes.extend(child.exit_code for child in children)
        return True

    # A child is cut at that time itself: this limit must not come first.
    code = run_service("gateway", main, drain_s=config.drain_s + GRACE_S)
    # Of one that a signal ended, as shells say it.
    return code or max((128 - it if it < 0 else it for it in codes), default=0)


async def _start(children: Sequence[_Child], tasks: asyncio.TaskGroup) -> None:
    """Start the first, for the port that all share, then the others; wait until all are ready."""
    first, *others = children
    tasks.create_task(first.keep_running())
    await first.ready.wait()
    for child in others:
        child.http_port = first.facts["http_port"]
        tasks.create_task(child.keep_running())
    for child in others:
        await child.ready.wait()


class _Child:
    """One gateway process, and the one after it if it dies."""

    def __init__(self, number: int, config: GatewayConfig, tell: Callable[..., None]) -> None:
        self._tell = tell
        self.http_port = config.http_port
        self.facts: dict[str, Any] = {}
        self.ready = asyncio.Event()
        self.exit_code = 0
        self._number = number
        self._config = config
        self._is_stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._error = ""

    def stop(self) -> None:
        """Have it drain and end, and not be replaced."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def keep_running(self) -> None:
        """Run it until ``stop``. Raises ProcessFailed: it ended before it was ready once."""
        while not self._is_stopping:
            try:
                await self._run_once()
            except OSError as error:  # no memory, descriptors or process ids for one more
                self._error = f"it cannot be started: {error.strerror}"
            if self._is_stopping:
                return
            reason = self._error or f"it ended with exit code {self.exit_code}"
            if not self.ready.is_set():
                raise ProcessFailed(f"gateway process {self._number}: {reason}")
            _log.error("a gateway process died", number=self._number, reason=reason)
            await asyncio.sleep(RESTART_AFTER_S)

    def _environment(self) -> dict[str, str]:
        config, facts = self._config, self.facts
        # One that is replaced must be found where it was.
        grpc_port = facts.get("grpc_port", config.grpc_port and config.grpc_port + self._number)
        mesh_port = facts.get("mesh_port", config.mesh_port and config.mesh_port + self._number)
        own = dataclasses.replace(
            config,
            gateway_processes=1,
            share_http_port=True,
            http_port=self.http_port,
            grpc_port=grpc_port,
            mesh_port=mesh_port,
            process_port=config.process_port and config.process_port + self._number,
            metrics_address=_nth(config.metrics_address, self._number),
        )
        return environment_of(own)

    async def _run_once(self) -> None:
        self._error = ""
        async with child_process("services.gateway", self._environment()) as (process, words):
            self._process = process
            if self._is_stopping:
                # ``stop`` came while it was being started, when there was no process to tell.
                process.terminate()
            async for told in words:
                if "error" in told:
                    self._error = str(told["error"])
                elif "planner" in told:
                    self._tell(**told)
                elif "part" not in told:  # of its start, which the log tells
                    self.facts = told
                    self.http_port = told["http_port"]
                    self.ready.set()
            self.exit_code = await process.wait()


def _nth(address: str, number: int) -> str:
    """Return where process ``number`` listens if the first one listens there."""
    if not address:
        return ""
    first = parse_address(address, param="metrics_address")
    return str(Address(first.host, first.port and first.port + number))
