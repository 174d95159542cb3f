"""Text for a reader that may not read: a pipe whose other end hangs, a terminal that was stopped.

A write to such a place waits without end, and with it everything that an event loop serves. Here it
leaves at once where there is room, else as soon as there is, by a thread; what is beyond
``MAX_LINES`` is lost, and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 10_000
"""Lines that wait for their reader."""

MAX_WRITE = 4096
"""Bytes that are written at once (PIPE_BUF), in whole lines: processes that share a pipe do not mix
theirs."""

GATHER_S = 0.05
"""How long lines wait for each other that need not leave at once."""

LAST_WORDS_S = 1.0
"""How long the end of a process waits for a reader."""


class UnblockedText(io.TextIOBase):
    """Writes into ``out`` and never waits; on any thread.

    on_lost: told by the thread how many lines were lost, when there is room again.
    """

    def __init__(self, out: TextIO, on_lost: Callable[[int], None] = lambda num: None) -> None:
        self._out = out
        self._on_lost = on_lost
        self._fd, self._put = _way_into(out)
        self._lines: deque[bytes] = deque()
        self._num_lost = 0
        self._has_lines = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Write it now, behind what waits, or leave it to the thread."""
        self._keep(text)
        if not self.drain():
            self._wake()
        return len(text)

    def gather(self, line: str) -> None:
        """Take a line that may wait for others: a write for each would cost more than its line."""
        self._keep(f"{line}\n")
        self._wake()

    def drain(self) -> bool:
        """Write what there is room for; False: something is left."""
        with self._writing:
            while self._lines:
                data = self._lines.popleft()
                while self._lines and len(data) + len(self._lines[0]) <= MAX_WRITE:
                    data += self._lines.popleft()
                try:
                    rest = data[self._put(data) :]
                except BlockingIOError:
                    self._lines.appendleft(data)
                    return False
                except (OSError, ValueError):  # its reader has gone
                    self._lines.clear()
                    break
                if rest:
                    self._lines.appendleft(rest)
        return True

    def flush(self) -> None:
        """Nothing: ``write`` has done what can be done."""

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._out.encoding or "utf-8"

    def _keep(self, text: str) -> None:
        if len(self._lines) >= MAX_LINES:
            self._num_lost += 1
        else:
            self._lines.append(text.encode(self.encoding, "replace"))

    def _wake(self) -> None:
        if not self._has_lines.is_set():
            self._has_lines.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def _run(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(GATHER_S)
            self._has_lines.clear()
            while not self.drain():
                _has_room(self._fd, 1.0)
            if num_lost := self._num_lost:
                self._num_lost -= num_lost
                self._on_lost(num_lost)

    def _end(self) -> None:
        until = time.monotonic() + LAST_WORDS_S
        while not self.drain() and (left_s := until - time.monotonic()) > 0:
            _has_room(self._fd, left_s)


def _way_into(out: TextIO) -> tuple[int, Callable[[bytes], int]]:
    """Return a file descriptor, and how to write as much as there is room for, which raises
    BlockingIOError where there is none; -1: only this process reads it."""
    try:
        fd = out.fileno()
    except (OSError, AttributeError):

        def put(data: bytes) -> int:
            out.write(data.decode(out.encoding or "utf-8"))
            return len(data)

        return -1, put
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        wire = socket.socket(fileno=os.dup(fd))
        return fd, lambda data: wire.send(data, socket.MSG_DONTWAIT)
    if not stat.S_ISREG(kind):
        # Opened anew, for whether writes wait is a property that all share who inherited it.
        with contextlib.suppress(OSError):
            fd = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            return fd, lambda data: os.write(fd, data)

    def put_if_room(data: bytes) -> int:
        if not _has_room(fd, 0.0):
            raise BlockingIOError
        return os.write(fd, data[:MAX_WRITE])

    return fd, put_if_room


def _has_room(fd: int, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(limit_s * 1000))
