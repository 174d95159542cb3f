"""Text for a reader that does not read: nobody waits for it, and it gets what there is in order."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from shared import unblocked
from shared.unblocked import MAX_LINES, MAX_WRITE, UnblockedText

LINE = "x" * 1000


def pipe_of(closing: ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 8 * MAX_WRITE)
    return reading, writing


def terminal_of(closing: ExitStack) -> tuple[int, int]:
    return pty.openpty()


def socket_of(closing: ExitStack) -> tuple[int, int]:
    """As systemd gives its services."""
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


@pytest.fixture(params=[pipe_of, terminal_of, socket_of])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, TextIO]]:
    """The reading end, and the writing one as a process gets it."""
    with ExitStack() as closing:
        reading, writing = request.param(closing)
        closing.callback(os.close, reading)
        yield reading, closing.enter_context(os.fdopen(writing, "w"))


def read_until(reading: int, is_enough: Callable[[str], bool]) -> str:
    text, give_up_at = "", time.monotonic() + 10
    while not is_enough(text):
        assert time.monotonic() < give_up_at, text[-200:]
        if select.select([reading], [], [], 0.05)[0]:
            text += os.read(reading, 1 << 16).decode().replace("\r", "")
    return text


def test_a_reader_that_stops_holds_nobody_up(ends: tuple[int, TextIO]) -> None:
    """When it reads again, it gets all of it, in order and whole."""
    reading, writing = ends
    out = UnblockedText(writing)
    numbers = range(500)
    for number in numbers:
        (out.gather if number % 3 else lambda line: out.write(f"{line}\n"))(f"{number} {LINE}")
    text = read_until(reading, lambda text: text.count("\n") >= len(numbers))
    assert text.splitlines() == [f"{number} {LINE}" for number in numbers]


def test_what_there_is_room_for_is_written_at_once(ends: tuple[int, TextIO]) -> None:
    """A process that ends by itself in the next line has said why."""
    reading, writing = ends
    out = UnblockedText(writing)
    out.gather("first")
    out.write("second\n")
    assert read_until(reading, lambda text: text.count("\n") == 2) == "first\nsecond\n"


def test_a_long_line_is_in_a_file_at_once(tmp_path: Path) -> None:
    """Whole: a process that has said why it fails may end before a thread runs."""
    with (tmp_path / "log").open("w", encoding="latin-1") as file:
        UnblockedText(file).write("\xe9" * 5 * MAX_WRITE)
        assert (tmp_path / "log").read_bytes() == b"\xe9" * 5 * MAX_WRITE


def test_what_is_beyond_the_room_is_lost_and_counted(ends: tuple[int, TextIO]) -> None:
    """The newest lines are: what went wrong first explains the rest."""
    reading, writing = ends
    lost: list[int] = []
    out = UnblockedText(writing, lost.append)
    num_lines = 2 * MAX_LINES
    for number in range(num_lines):
        out.write(f"{number} of many\n")
    text = read_until(reading, lambda text: text.count("\n") + sum(lost) == num_lines)
    assert lost
    numbers = [int(line.split()[0]) for line in text.splitlines()]
    assert numbers == [*range(len(numbers))]


def test_a_reader_that_has_left_fails_nobody() -> None:
    """Of a pipe: ``pdmesh up | head``."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as end:
        out = UnblockedText(end)
        os.close(reading)
        out.write("nobody hears\n")
        assert out.drain()


@pytest.mark.parametrize("reads", [True, False])
def test_a_process_ends_whoever_reads(reads: bool) -> None:
    """And what it said is there, if somebody does."""
    program = (
        "import sys; from shared.unblocked import UnblockedText\n"
        "out = UnblockedText(sys.stdout)\n"
        f"for number in range(300): out.gather(f'{{number}} {LINE}')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    if reads:
        told, _ = child.communicate(timeout=20)
        assert len(told.splitlines()) == 300
    assert child.wait(unblocked.LAST_WORDS_S + 20) == 0
    assert child.stdout is not None
    child.stdout.close()
