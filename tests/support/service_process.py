"""One process of ours under a test's eyes: what it says, what it holds open, and its end.

No task: asyncio calls back, so a process may outlive the test that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDS_WITHIN_S = 60.0
"""Also the limit for its words."""

_PORTS = random.SystemRandom()
_GIVEN: deque[int] = deque(maxlen=300)


class ServiceProcess(asyncio.SubprocessProtocol):
    """One process: what it wrote to stderr, its ports, and its end."""

    def __init__(self, name: str, metrics_port: int, cord: socket.socket) -> None:
        self.name = name
        self.log: list[str] = []
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.metrics_port = metrics_port
        self.facts: dict[str, Any] = {}
        self._cord = cord
        self._rest = b""
        self._changed = asyncio.Event()
        self._has_ended = False
        self._is_silent = False
        self._transport: asyncio.SubprocessTransport | None = None

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.log += [line.decode(errors="replace") for line in lines]
        self._note_change()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._is_silent = True
        self._note_change()

    def process_exited(self) -> None:
        self._has_ended = True
        self._cord.close()
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the test's side ------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._transport is not None
        return self._transport.get_pid()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; a stopped process lives."""
        return not self._has_ended

    async def said(self, pattern: str) -> str:
        """Wait for a line on stderr that matches."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                for line in self.log:
                    if re.search(pattern, line):
                        return line
                if self._has_ended and self._is_silent:
                    last = "\n".join(self.log[-20:])
                    raise AssertionError(f"{self.name} ended without {pattern!r}; it said:\n{last}")
                await self._changed.wait()

    async def ended(self) -> int:
        """Wait for its end and the end of its words; the exit code, negative for a signal."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while not (self._has_ended and self._is_silent):
                await self._changed.wait()
        assert self._transport is not None
        code = self._transport.get_returncode()
        assert code is not None
        assert not [line for line in self.log if '"refused_fields"' in line], self.name
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to a process that lives."""
        assert self.is_alive, f"{self.name} has ended"
        assert self._transport is not None
        self._transport.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.send(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def stop(self) -> None:
        """SIGTERM: it must drain and end well."""
        self.send(signal.SIGTERM)
        assert await self.ended() == 0, self.name

    async def acted(self, point: str) -> float:
        """Wait until its failpoint has acted; the loop time at which that was seen."""
        await self.said(f"^failpoint {re.escape(point)} ")
        return asyncio.get_running_loop().time()

    async def end_at_once(self) -> None:
        """Kill what still lives and let go of it."""
        assert self._transport is not None
        try:
            if self.is_alive:
                self._transport.kill()
                await self.ended()
        finally:
            self._transport.close()

    # --- what the system knows of it ------------------------------------------------------------

    @property
    def num_files(self) -> int:
        """Descriptors that it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def listening(self) -> Iterator[tuple[str, int]]:
        """Every IPv4 address on which it listens, UCX's own included."""
        folder = Path(f"/proc/{self.pid}")
        sockets: set[str] = set()
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
        for line in (folder / "net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                host, _, port = fields[1].partition(":")
                packed = struct.pack("<I", int(host, 16))
                yield ".".join(map(str, packed)), int(port, 16)


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row that nobody uses now, and that the system gives nobody
    who asks for any port.

    None of the last 300 is given again: who got one binds it later, often a second later, and a run
    of all tests takes more than there are. Of its own source: the tests' is seeded anew for each,
    so that they would draw the same ports. Each process of tests that run side by side has ports of
    its own.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw15").removeprefix("gw"))
    own = range(20_000, 30_000)[process % 16 * 625 :][:625]
    while True:
        first = _PORTS.choice(own[: 1 - count or None])
        wanted = range(first, first + count)
        if not {*wanted}.isdisjoint(_GIVEN):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in wanted:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _GIVEN.extend(wanted)
            return first
