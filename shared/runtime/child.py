"""Runs a module of ours as a process on a cord (``parent.py`` is the other end of it)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import orjson

from shared.runtime.parent import PARENT_FD


@contextlib.asynccontextmanager
async def child_process(
    module: str, env: Mapping[str, str], output: int | None = None
) -> AsyncGenerator[tuple[Process, AsyncGenerator[dict[str, Any]]]]:
    """Run it for the length of the block, at whose end it is killed unless it has ended.

    Yields it and what it tells until it ends. env: what it gets beside our own environment.
    output: the file that takes what it prints; None = ours.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        with theirs:
            cord = {PARENT_FD: str(theirs.fileno())}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the working directory's "shared" is not ours
                "-m",
                module,
                env={**os.environ, **our_code(), **env, **cord},
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
            )
        try:
            yield process, _told(ours)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _told(cord: socket.socket) -> AsyncGenerator[dict[str, Any]]:
    """Yield each line that comes, until its end."""
    loop = asyncio.get_running_loop()
    received = b""
    while chunk := await loop.sock_recv(cord, 4096):
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            yield orjson.loads(line)


def our_code() -> dict[str, str]:
    """Return the variables that make a child run the code that we run: in a checkout that is not
    installed, its root."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path or root.endswith("-packages"):
        return {}
    others = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{root}{os.pathsep}{others}" if others else root}
