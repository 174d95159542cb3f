"""A process with one UCX transport that does what its standard input says, one JSON line an order.

Run as ``python -m tests.support.ucx_peer``; ``Peer`` is the handle on it. Standard output carries
one JSON line an answer; whatever else wants to speak uses standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import TransferFailed

ANSWER_S = 60.0
TCP_LISTEN = "0A"
"""As /proc/net/tcp writes it."""


def pattern(tag: int, num_bytes: int) -> np.ndarray:
    """Bytes that differ for different tags and positions."""
    words = np.arange(num_bytes // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(tag)).view(np.uint8)[:num_bytes].copy()


class Peer:
    """A running peer process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, order: str, **arguments: Any) -> Any:
        """Give an order and return its answer."""
        await self.tell(order, **arguments)
        return await self.answer()

    async def tell(self, order: str, **arguments: Any) -> None:
        """Give an order whose answer will be read later, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"order": order, **arguments}).encode() + b"\n")
        await self.process.stdin.drain()

    async def answer(self) -> Any:
        """Read the next answer."""
        assert self.process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await self.process.stdout.readline()
        assert line, "the peer ended without an answer"
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end and reap it, without which UCX sees no death; return the exit code."""
        async with asyncio.timeout(ANSWER_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def a_peer(**environment: str) -> AsyncIterator[Peer]:
    """Start a peer process; kill it at the end if it still runs.

    PEER_LOOP: ``uvloop``. PEER_PROGRAM: run this Python text instead. PEER_PREFIX: a command that
    runs it.
    """
    program = environment.pop("PEER_PROGRAM", "")
    prefix = environment.pop("PEER_PREFIX", "").split()
    arguments = ("-c", program) if program else ("-m", "tests.support.ucx_peer")
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    process = await asyncio.create_subprocess_exec(
        *prefix, sys.executable, *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env | environment,
    )  # fmt: skip
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def a_pair(**environment: str) -> AsyncIterator[tuple[Peer, Peer]]:
    """Start two peers, connected to each other."""
    async with a_peer(**environment) as left, a_peer(**environment) as right:
        left_address, right_address = await left.ask("open"), await right.ask("open")
        await left.ask("connect", address=right_address)
        await right.ask("connect", address=left_address)
        yield left, right


class _Session:
    """The child's side."""

    def __init__(self) -> None:
        self.operations: dict[int, tuple[Any, np.ndarray]] = {}
        self.windows: list[np.ndarray] = []
        self.num_lost = 0
        self.lost = asyncio.Event()

    def on_lost(self) -> None:
        self.num_lost += 1
        self.lost.set()

    async def open(self) -> str:
        from shared.transport.ucxx import open_ucx

        self.transport = await open_ucx()
        return self.transport.address.hex()

    async def connect(self, address: str) -> bool:
        self.endpoint = await self.transport.connect(bytes.fromhex(address), self.on_lost)
        return True

    async def try_connect(self, address: str) -> bool:
        """Return False if it is refused as TransferFailed."""
        try:
            return await self.connect(address)
        except TransferFailed:
            return False

    async def address(self) -> str:
        return self.transport.address.hex()

    async def tcp_ports(self) -> list[int]:
        """Where UCX waits for connections over tcp."""
        fds = list(Path("/proc/self/fd").iterdir())
        sockets = {os.readlink(fd) for fd in fds if os.path.lexists(fd)}
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return [
            int(row[1].split(":")[1], 16)
            for row in rows
            if row[3] == TCP_LISTEN and f"socket:[{row[9]}]" in sockets
        ]

    async def send(self, tag: int, num_bytes: int) -> bool:
        """Post a send of ``pattern(tag)``; wait for it with ``settle``."""
        data = pattern(tag, num_bytes)
        self.operations[tag] = self.endpoint.send(data, num_bytes, tag), data
        return True

    async def receive(self, tag: int, num_bytes: int) -> bool:
        """Post a receive into zeros."""
        buffer = np.zeros(num_bytes, np.uint8)
        operation = self.transport.receive(self.endpoint, buffer, num_bytes, tag)
        self.operations[tag] = operation, buffer
        return True

    async def offer_window(self, tag: int, num_bytes: int) -> str | None:
        """Return the key of a new window; ``tag`` is whose word it waits for."""
        window = await self.transport.new_window(num_bytes)
        if window is None:
            return None
        buffer = np.frombuffer(window.memory, np.uint8)
        buffer[:] = 0
        operation = self.transport.receive(self.endpoint, buffer, 8, tag)
        self.operations[tag] = operation, buffer
        return window.key.hex()

    async def write_window(self, tag: int, key: str) -> bool:
        """Map it, write ``pattern(tag)``, say so; False: it cannot be mapped."""
        memory = await self.endpoint.map_window(bytes.fromhex(key))
        if memory is None:
            return False
        window = np.frombuffer(memory, np.uint8)
        self.windows.append(window)
        data = pattern(tag, len(window))
        window[:] = data
        self.operations[tag] = self.endpoint.send(data, 8, tag), data
        return True

    async def rewrite_windows(self) -> bool:
        """Write all that was mapped once more."""
        for window in self.windows:
            window[:] = 7
        return True

    async def settle(self, tag: int) -> list[Any]:
        """Return [outcome, error, whether the buffer holds the pattern, whether it holds zeros]."""
        operation, buffer = self.operations[tag]
        outcome = await operation.settled()
        is_pattern = bool((buffer == pattern(tag, len(buffer))).all())
        return [outcome.value, operation.error, is_pattern, not buffer.any()]

    async def peek(self, tag: int) -> str | None:
        outcome = self.operations[tag][0].outcome
        return None if outcome is None else outcome.value

    async def cancel(self, tag: int) -> bool:
        self.operations[tag][0].cancel()
        return True

    async def cancel_and_reuse(self, tag: int) -> str:
        """Cancel, wait until settled, give the buffer to somebody else: fill it with 0xEE."""
        operation, buffer = self.operations[tag]
        operation.cancel()
        outcome = await operation.settled()
        buffer[:] = 0xEE
        return outcome.value

    async def is_reused_intact(self, tag: int) -> bool:
        return bool((self.operations[tag][1] == 0xEE).all())

    async def wait_lost(self) -> int:
        await self.lost.wait()
        return self.num_lost

    async def count_lost(self) -> int:
        return self.num_lost

    async def alive(self) -> bool:
        return self.endpoint.alive

    async def find_lane(self, num_bytes: int, sends: bool) -> tuple[str, int]:
        """What carried a message like one that has crossed, and how sure that is."""
        return await self.endpoint.find_lane(bytearray(1), num_bytes, sends=sends)

    async def idle_cpu_share(self, seconds: float) -> float:
        """CPU time of all threads over a wait, as a share of one core."""
        began_at, cpu_began = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu_began) / (time.monotonic() - began_at)

    async def close_endpoint(self) -> bool:
        await self.endpoint.close()
        return True

    async def close(self) -> list[str]:
        """Close the transport; return the names of the threads that still run."""
        import threading

        await self.transport.close()
        return [thread.name for thread in threading.enumerate() if "ucx" in thread.name]


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    session = _Session()
    while line := await reader.readline():
        arguments = json.loads(line)
        if (order := arguments.pop("order")) == "leave":
            break
        answer = await getattr(session, order)(**arguments)
        print(json.dumps(answer), flush=True)
    pipe.close()


if __name__ == "__main__":
    loop_factory = None
    if os.environ.get("PEER_LOOP") == "uvloop":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve())
