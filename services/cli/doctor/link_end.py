"""One of the two processes between which ``pdmesh doctor`` measures UCX: ``python -m
services.cli.doctor.link_end``. Obeys JSON lines on stdin and answers with JSON lines on stdout."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from shared.errors import MeshError, TransferFailed
from shared.transport.base import Outcome
from shared.transport.ucxx import open_ucx

WINDOW: Final = 8
"""Messages in flight."""


def main() -> None:
    """Serve one measurement; what goes wrong is told as ``{"error": ...}``."""
    try:
        asyncio.run(_serve())
    except MeshError as error:
        _say({"error": error.message})


async def _serve() -> None:
    transport = await open_ucx()
    try:
        _say({"address": transport.address.hex(), **_loaded_ucx()})
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        address = bytes.fromhex(json.loads(await reader.readline()))
        endpoint = await transport.connect(address, lambda: None)
        _say({})
        while line := await reader.readline():
            job = json.loads(line)
            run = _send if job.pop("sends") else _receive
            _say(await run(transport, endpoint, **job))
    finally:
        await transport.close()


async def _send(transport: Any, endpoint: Any, *, num_bytes: int, count: int, tag: int) -> Any:
    """Push, and count until the receiver says that it has all."""
    buffer, word = bytearray(b"\1" * num_bytes), bytearray(1)
    answer = transport.receive(endpoint, word, 1, tag + count)
    in_flight: deque[Any] = deque()
    began_at = time.perf_counter()
    for index in range(count):
        if len(in_flight) == WINDOW:
            await _done(in_flight.popleft())
        in_flight.append(endpoint.send(buffer, num_bytes, tag + index))
    await _done(*in_flight, answer)
    seconds = time.perf_counter() - began_at
    return {"seconds": seconds, "found": await endpoint.find_lane(buffer, num_bytes, sends=True)}


async def _receive(transport: Any, endpoint: Any, *, num_bytes: int, count: int, tag: int) -> Any:
    buffers = [bytearray(num_bytes) for _ in range(WINDOW)]
    in_flight: deque[Any] = deque()
    for index in range(count):
        if len(in_flight) == WINDOW:
            await _done(in_flight.popleft())
        buffer = buffers[index % WINDOW]
        in_flight.append(transport.receive(endpoint, buffer, num_bytes, tag + index))
    await _done(*in_flight)
    await _done(endpoint.send(bytearray(1), 1, tag + count))
    if any(buffer.count(1) != num_bytes for buffer in buffers[:count]):
        raise TransferFailed("the bytes that arrived are not those that were sent")
    return {"found": await endpoint.find_lane(buffers[0], num_bytes, sends=False)}


async def _done(*operations: Any) -> None:
    for operation in operations:
        if await operation.settled() is not Outcome.DONE:
            raise TransferFailed(f"a message failed: {operation.error}")


def _loaded_ucx() -> dict[str, Any]:
    """Which UCX this process has loaded, and what it can drive."""
    maps = Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libuct" in line}
    core = next((path for path in sorted(paths) if Path(path).name.startswith("libuct.")), "")
    found = Path(core).parent.glob("ucx/libuct_*.so*") if core else ()
    modules = {path.name.split(".")[0].removeprefix("libuct_") for path in found}
    return {"library": core, "modules": sorted(modules)}


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
