"""One end of our Transport between two processes, ordered about by the JSON lines of
``pairs.py``.

With windows the sender copies its buffer into the receiver's, and what it sends is its word: 64
bytes, as a frame's header has (the mesh gathers KV into the window and copies nothing).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import uvloop

from bench.transfer.end import pin, say
from bench.transfer.pairs import WINDOW
from bench.transfer.served_end import Sink, Source, done
from shared.transfer.frames import HEADER_BYTES
from shared.transport.ucxx import UcxEndpoint, UcxTransport, open_ucx
from shared.worker.process import SWITCH_INTERVAL_S


async def serve(how: str) -> None:
    """Obey the parent: open, connect, then send or receive batches.

    how: "windows" or "messages" of host memory, each also "as served" (``served_end.py``), or
    "cuda": messages of the first device's.
    """
    is_served = how.endswith("as served")
    new_buffer, prepare = host_buffer, None
    if how == "cuda":
        new_buffer, prepare = device_buffer, enter_device
    transport = await open_ucx(prepare_thread=prepare)
    say(transport.address.hex())
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    address = json.loads(await reader.readline())
    endpoint = await transport.connect(bytes.fromhex(address), lambda: None)
    say("")
    buffers: dict[int, Any] = {}
    keys: dict[int, str] = {}
    windows: dict[str, np.ndarray | None] = {"": None}
    sinks: dict[int, Sink] = {}
    sources: dict[int, Source] = {}
    while line := await reader.readline():
        job = json.loads(line)
        num_bytes = job["num_bytes"]
        if is_served and job["end"] == "receive":
            if num_bytes not in sinks:
                has_windows = how.startswith("windows")
                sinks = {num_bytes: await Sink.open(transport, num_bytes, has_windows=has_windows)}
            await sinks[num_bytes].receive(transport, endpoint, job)
            continue
        if is_served:
            if num_bytes not in sources:
                sources = {num_bytes: await Source.open(endpoint, job["posted"], num_bytes)}
            told = await timed(job, partial(sources[num_bytes].send, transport, endpoint, job))
            say({**told, "lane": ""})
            continue
        if num_bytes not in buffers:
            buffers[num_bytes], keys[num_bytes] = new_buffer(num_bytes), ""
            if how == "windows" and job["end"] == "receive":
                buffers[num_bytes], keys[num_bytes] = await open_window(transport, num_bytes)
        if job["end"] == "receive":
            await receive(transport, endpoint, buffers[num_bytes], keys[num_bytes], job)
            continue
        if (key := job["posted"]) not in windows:
            memory = await endpoint.map_window(bytes.fromhex(key))
            windows[key] = None if memory is None else np.frombuffer(memory, np.uint8)
        await send(transport, endpoint, buffers[num_bytes], windows[key], job)
    buffers.clear()
    windows.clear()
    sinks.clear()
    sources.clear()
    pipe.close()
    await transport.close()


def host_buffer(num_bytes: int) -> np.ndarray:
    return np.ones(num_bytes, np.uint8)


def enter_device() -> None:
    """Make the first device the calling thread's."""
    import torch

    torch.cuda.set_device(0)


def device_buffer(num_bytes: int) -> Any:
    """Ones in the first device's memory, written before anybody sends them."""
    import torch

    ones = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0")
    settle(ones)
    return ones


async def open_window(transport: UcxTransport, num_bytes: int) -> tuple[np.ndarray, str]:
    """Memory that the sender may write, and its key."""
    window = await transport.new_window(num_bytes)
    if window is None:
        sys.exit("no window")
    return np.frombuffer(window.memory, np.uint8), window.key.hex()


async def receive(
    transport: UcxTransport,
    endpoint: UcxEndpoint,
    buffer: Any,
    key: str,
    job: dict[str, Any],
) -> None:
    """Receive a batch and answer its end with one byte; in a latency job, each message."""
    count, tag = job["count"], job["tag"]
    num_bytes = HEADER_BYTES if key else job["num_bytes"]
    window, each = (1, 1) if job["is_latency"] else (WINDOW, count)
    ack = np.zeros(1, np.uint8)
    buffer[:] = 0
    settle(buffer)
    in_flight: deque[Any] = deque()
    for idx in range(min(window, count)):
        in_flight.append(transport.receive(endpoint, buffer, num_bytes, tag + idx))
    say(key)
    for idx in range(count):
        await done(in_flight.popleft())
        if idx + window < count:
            in_flight.append(transport.receive(endpoint, buffer, num_bytes, tag + idx + window))
        if (idx + 1) % each == 0:
            await done(endpoint.send(ack, 1, tag + count + idx))
    if not buffer.all():
        sys.exit("the bytes did not arrive")


async def send(
    transport: UcxTransport,
    endpoint: UcxEndpoint,
    buffer: Any,
    window: np.ndarray | None,
    job: dict[str, Any],
) -> None:
    """Send a batch; say how long it took until the other end had answered."""
    count, tag = job["count"], job["tag"]

    def push(idx: int) -> Any:
        if window is None:
            return endpoint.send(buffer, len(buffer), tag + idx)
        np.copyto(window, buffer)
        return endpoint.send(buffer, HEADER_BYTES, tag + idx)

    ack = np.zeros(1, np.uint8)

    async def push_all(first: int, stop: int) -> None:
        answer = transport.receive(endpoint, ack, 1, tag + count + stop - 1)
        in_flight: deque[Any] = deque()
        for idx in range(first, stop):
            if len(in_flight) == WINDOW:
                await done(in_flight.popleft())
            in_flight.append(push(idx))
        for operation in (answer, *in_flight):
            await done(operation)

    told = await timed(job, push_all)
    lane, _ = await endpoint.find_lane(buffer, len(buffer), sends=True)
    say({**told, "lane": lane})


async def timed(
    job: dict[str, Any], push_all: Callable[[int, int], Awaitable[None]]
) -> dict[str, Any]:
    """Send a batch, or one message after the other; return how long it took, and what of a core.
    push_all: the messages from one to another, until the other end has answered."""
    times: list[float] = []
    began_at, cpu_began = time.perf_counter(), time.process_time()
    if job["is_latency"]:
        for idx in range(job["count"]):
            sent_at = time.perf_counter()
            await push_all(idx, idx + 1)
            times.append(time.perf_counter() - sent_at)
    else:
        await push_all(0, job["count"])
    took_s = time.perf_counter() - began_at
    cores = (time.process_time() - cpu_began) / took_s
    return {"seconds": took_s, "each": times, "cores": cores}


def settle(buffer: Any) -> None:
    """Wait until what was written to a device's memory is there: UCX knows no streams."""
    if not isinstance(buffer, np.ndarray):
        import torch

        torch.cuda.synchronize(buffer.device)


if __name__ == "__main__":
    pin(sys.argv[2])
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as workers do
    uvloop.run(serve(sys.argv[3]))
