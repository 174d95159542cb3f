"""Runs a client program of other people to its end, offline, in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import NamedTuple

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    # What would leave this machine all the same finds a closed door, at once.
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}

SHOWN_CHARS = 6000


class Ended(NamedTuple):
    """How a program ended. words: stdout and stderr, as they came."""

    code: int
    words: str


async def run_client(
    *command: str | Path, cwd: Path, within_s: float, environment: dict[str, str] | None = None
) -> Ended:
    """Run a program with no settings but ours; its home is ``cwd``.

    Fails the test if it has not ended in time, after killing it and its children.
    """
    settings = {
        "PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}",
        "HOME": str(cwd),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **OFFLINE,
        **(environment or {}),
    }
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=cwd,
        env=settings,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    words = bytearray()
    try:
        async with asyncio.timeout(within_s):
            while chunk := await process.stdout.read(1 << 16):
                words += chunk
            code = await process.wait()
    except TimeoutError:
        text = words.decode(errors="replace")[-SHOWN_CHARS:]
        raise AssertionError(f"{command[0]} did not end in {within_s:g} s:\n{text}") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Ended(code, words.decode(errors="replace"))


async def run_client_well(
    *command: str | Path, cwd: Path, within_s: float, environment: dict[str, str] | None = None
) -> str:
    """Run a program that must end with 0; returns its words."""
    ended = await run_client(*command, cwd=cwd, within_s=within_s, environment=environment)
    assert ended.code == 0, f"exit code {ended.code}:\n{ended.words[-SHOWN_CHARS:]}"
    return ended.words
