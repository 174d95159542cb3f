"""Processes that a question starts beside itself, and how it waits until they answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from bench.record import PROJECT

ENDS_WITHIN_S = 20.0


@contextlib.contextmanager
def shown_log() -> Iterator[Path]:
    """Make a log in a folder of its own for the length of the block; it is shown if that ends
    badly."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "log"
        log.touch()
        try:
            yield log
        except BaseException:
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
            raise


@contextlib.asynccontextmanager
async def process(
    command: Sequence[str | Path],
    log: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    folder: Path = PROJECT,
    cores: Collection[int] = (),
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a program for the length of the block. environ: on top of ours. cores: those that it may
    run on; () = ours."""
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *map(str, command),
            env={**os.environ, **environ},
            stdout=output,
            stderr=output,
            cwd=folder,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await child.wait()
        if child.returncode is None:
            child.kill()
            await child.wait()


async def wait_until(
    url: str,
    child: asyncio.subprocess.Process,
    *,
    within_s: float = 60.0,
    poll_s: float = 0.05,
    body: Any = None,
    statuses: Collection[int] = (200,),
) -> None:
    """Ask, with a body by POST, until the answer has one of these statuses. Raises RuntimeError:
    the process ended, or the limit came."""
    method, give_up_at = "GET" if body is None else "POST", time.monotonic() + within_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < give_up_at and child.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.request(method, url, json=body, ssl=False) as response:
                    if response.status in statuses:
                        return
            await asyncio.sleep(poll_s)
    raise RuntimeError(f"{url} did not answer in time (exit code so far: {child.returncode})")


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the JSON of each event of a streamed answer. Raises RuntimeError: it was refused,
    broke, or has no end."""
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
    is_done = False
    async for line in response.content:
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(line.decode())
        if line.startswith(b"data: {"):
            yield line[6:]
        is_done = is_done or line.startswith(b"data: [DONE]")
    if not is_done:
        raise RuntimeError("an answer has no end")
