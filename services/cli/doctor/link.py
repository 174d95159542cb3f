"""How fast two processes of this machine exchange bytes, measured with the transport that workers
use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from services.local import our_code
from shared.errors import MeshError, TransferFailed
from shared.lanes import Certainty, LaneFinding, more_certain

MESSAGE_BYTES: Final = 8 << 20
"""As large as the largest frame."""

NUM_MESSAGES: Final = 16
NUM_ROUNDS: Final = 3
GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """What was measured. lane: what carried the bytes. library: the UCX that was loaded. modules:
    what it can drive beside TCP and shared memory, e.g. 'ib', 'cuda'."""

    lane: str
    gb_per_s: float
    library: str
    modules: tuple[str, ...]


async def measure_link(environment: Mapping[str, str]) -> Link:
    """Move some messages from one fresh process to another and return the median rate.

    environment: added to ours, e.g. UCX_TLS.
    Raises MeshError: UCX cannot be loaded, or the two do not reach each other; the message says
    why.
    """
    async with _end(environment) as source, _end(environment) as target:
        left, right = await source.answer(), await target.answer()
        source.tell(right["address"])
        target.tell(left["address"])
        await source.answer()
        await target.answer()
        rates: list[float] = []
        found = LaneFinding("", Certainty.UNKNOWN)
        tag = 1
        for _ in range(1 + NUM_ROUNDS):  # the first one warms up
            job = {"num_bytes": MESSAGE_BYTES, "count": NUM_MESSAGES, "tag": tag}
            tag += NUM_MESSAGES + 1
            target.tell({**job, "sends": False})
            source.tell({**job, "sends": True})
            sent, received = await source.answer(), await target.answer()
            found = more_certain(LaneFinding(*sent["found"]), LaneFinding(*received["found"]))
            rates.append(MESSAGE_BYTES * NUM_MESSAGES / sent["seconds"] / GB)
    gb_per_s = statistics.median(rates[1:])
    return Link(found.lane, gb_per_s, left["library"], tuple(left["modules"]))


class _End:
    """One of the two processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its answer says why it has ended
            self._process.stdin.write(orjson.dumps(order) + b"\n")

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise TransferFailed(f"the measuring process ended with exit code {code}")
        answer: Any = orjson.loads(line)
        if "error" in answer:
            raise TransferFailed(str(answer["error"]))
        return answer


@contextlib.asynccontextmanager
async def _end(environment: Mapping[str, str]) -> AsyncGenerator[_End]:
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "services.cli.doctor.link_end"),
            env={**os.environ, **our_code(), **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # UCX's own words; ours are in the answers
            start_new_session=True,
        )
    except OSError as error:
        raise _CannotStart(f"cannot start a process: {error}") from None
    try:
        yield _End(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _CannotStart(MeshError):
    type = "cannot_start"
