"""``pdmesh`` as a process of its own: what it prints, what it starts, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tests.support.house import ROOT

LIMIT_S = 120.0
KEPT_S = 3600.0


class Command:
    """A running ``pdmesh`` and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process, tasks: asyncio.TaskGroup) -> None:
        self.process = process
        self.out = ""
        self.err = ""
        self._grew = asyncio.Condition()
        self._readers = [
            tasks.create_task(self._read("out", process.stdout)),
            tasks.create_task(self._read("err", process.stderr)),
        ]

    async def _read(self, name: str, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while chunk := await stream.read(65536):
            async with self._grew:
                setattr(self, name, getattr(self, name) + chunk.decode(errors="replace"))
                self._grew.notify_all()
        async with self._grew:
            self._grew.notify_all()

    async def said(self, pattern: str) -> re.Match[str]:
        """Wait for words on stdout."""
        found: re.Match[str] | None = None

        def is_said() -> bool:
            nonlocal found
            found = re.search(pattern, self.out)
            return found is not None or self._readers[0].done()

        async with self._grew:
            await self._grew.wait_for(is_said)
        assert found is not None, f"it ended without {pattern!r}:\n{self.out}\n{self.err}"
        return found

    async def url(self) -> str:
        """Wait until a request can be served; the base URL."""
        return (await self.said(r"ready: (http://\S+)/ "))[1]

    @property
    def children(self) -> list[int]:
        """Every process that it has said to have started."""
        return sorted({int(pid) for pid in re.findall(r"pid (\d+)", self.out)})

    async def ended(self) -> int:
        """Wait for its end, and that of everything it started; its exit code."""
        code = await self.process.wait()
        await asyncio.wait(self._readers)
        for pid in self.children:
            await has_ended(pid)
        return code


async def has_ended(pid: int) -> None:
    """Wait until a process that need not be our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@contextlib.asynccontextmanager
async def pdmesh(
    *arguments: str, limit_s: float = LIMIT_S, **variables: str
) -> AsyncIterator[Command]:
    """Run a command; whatever is left of it at the end is killed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
    async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.cli",
            *arguments,
            cwd=ROOT,
            env={**environment, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        command = Command(process, tasks)
        try:
            yield command
        finally:
            for pid in (process.pid, *command.children):
                if process.returncode is None or pid != process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await process.wait()


@contextlib.contextmanager
def kept_up(*arguments: str) -> Iterator[Command]:
    """``pdmesh up`` for a fixture of several tests, each of which has a loop of its own: it is
    ready, and must end well."""
    started: Future[Command] = Future()
    is_over = threading.Event()

    async def run() -> None:
        async with pdmesh("up", *arguments, limit_s=KEPT_S) as up:
            try:
                async with asyncio.timeout(LIMIT_S):
                    await up.url()
            except BaseException as error:
                started.set_exception(error)
                raise
            started.set_result(up)
            await asyncio.to_thread(is_over.wait)
            up.process.terminate()
            assert await up.ended() == 0

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, run())
        try:
            yield started.result()
        finally:
            is_over.set()
            running.result()


async def run_pdmesh(*arguments: str) -> str:
    """Run a command to its end, which must be a good one; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
    async with asyncio.timeout(LIMIT_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", *arguments),
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()
