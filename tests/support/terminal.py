"""A command on a terminal of its own: what stands on the screen, what is typed, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from typing import Any

import pyte

from tests.support.command import LIMIT_S
from tests.support.fork_server import take_terminal
from tests.support.house import ROOT

COLUMNS, LINES = 160, 48


class Terminal:
    """A running command and its screen."""

    def __init__(
        self, process: asyncio.subprocess.Process, screen: int, size: tuple[int, int]
    ) -> None:
        self.process = process
        self._screen = screen
        self._view = pyte.Screen(*size)
        self._has_ended = asyncio.Event()
        self._stream = pyte.ByteStream(self._view)
        self._grew = asyncio.Event()
        os.set_blocking(screen, False)
        asyncio.get_running_loop().add_reader(screen, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._screen, 65536)
        except OSError:  # the other side has closed
            chunk = b""
        if chunk:
            self._stream.feed(chunk)
            if b"\x1b[6n" in chunk:  # an editor asks where the cursor is
                cursor = self._view.cursor
                os.write(self._screen, f"\x1b[{cursor.y + 1};{cursor.x + 1}R".encode())
        else:
            asyncio.get_running_loop().remove_reader(self._screen)
            self._has_ended.set()
        self._grew.set()

    @property
    def shown(self) -> str:
        """The screen as it is now."""
        return "\n".join(line.rstrip() for line in self._view.display).rstrip()

    @property
    def shows_cursor(self) -> bool:
        return not self._view.cursor.hidden

    def type(self, keys: str) -> None:
        """Press keys: ``\\r`` is Enter, ``\\x03`` Ctrl-C, ``\\x04`` Ctrl-D."""
        os.write(self._screen, keys.encode())

    async def shows(self, pattern: str, *, without: str = "$^") -> None:
        """Wait until a pattern stands on the screen, and the other one does not."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not re.search(pattern, self.shown) or re.search(without, self.shown):
                    if self.process.returncode is not None:
                        raise AssertionError(f"it ended without {pattern!r}:\n{self.shown}")
                    self._grew.clear()
                    await self._grew.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} did not come:\n{self.shown}") from None

    def is_echoing(self) -> bool:
        """Whether the terminal is as a shell wants it: lines, with echo."""
        flags = termios.tcgetattr(self._screen)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    async def ended(self) -> int:
        """Wait for its end, and for all that it wrote; the exit code."""
        async with asyncio.timeout(LIMIT_S):
            code = await self.process.wait()
            await self._has_ended.wait()
            return code

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._screen)
        os.close(self._screen)


@contextlib.asynccontextmanager
async def on_a_terminal(
    *arguments: str, size: tuple[int, int] = (COLUMNS, LINES), **variables: str
) -> AsyncIterator[Terminal]:
    """Run ``pdmesh`` on a terminal; whatever is left of it at the end is killed. size: columns and
    lines."""
    screen, keyboard = pty.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    others = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}

    options: dict[str, Any] = {"stdin": keyboard, "stdout": keyboard, "stderr": keyboard}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *arguments),
        cwd=ROOT,
        env={**others, "TERM": "xterm-256color", **variables},
        preexec_fn=take_terminal,
        **options,
    )
    os.close(keyboard)
    terminal = Terminal(process, screen, size)
    try:
        yield terminal
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        terminal.close()
