"""What the signals of a command do."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from services.cli.interrupts import Interrupts, run_interruptible
from shared.errors import ModelError


def test_the_first_signal_cleans_up_and_the_second_ends_at_once() -> None:
    """The command is cancelled once; its cleanup is not cut short by the second."""
    interrupts = Interrupts()
    told: list[str] = []
    is_killed = asyncio.Event()
    interrupts.on_first = lambda: told.append("first")
    interrupts.at_once = is_killed.set

    async def command() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            told.append("cleanup")
            os.kill(os.getpid(), signal.SIGINT)
            await is_killed.wait()
            told.append("clean")

    assert interrupts.run(command) == 130
    assert told == ["first", "cleanup", "clean"]


def test_the_exit_code_tells_the_signal_and_errors_are_raised() -> None:
    """128 + its number; an error of the command is the command's."""

    async def waits() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ModelError("no")

    assert Interrupts().run(waits) == 128 + signal.SIGTERM
    with pytest.raises(ModelError):
        Interrupts().run(fails)


@pytest.mark.parametrize(("before", "code"), [(signal.SIG_DFL, 129), (signal.SIG_IGN, 0)])
def test_under_nohup_a_terminal_that_goes_away_ends_nothing(
    before: signal.Handlers, code: int
) -> None:
    """And without it the command ends as by Ctrl-C."""

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)

    was = signal.signal(signal.SIGHUP, before)
    try:
        assert run_interruptible(main) == code
    finally:
        signal.signal(signal.SIGHUP, was)


@pytest.mark.usefixtures("hears_hangup")
def test_a_terminal_that_goes_away_says_so_twice_and_cleanup_goes_on() -> None:
    """Its shell tells its jobs, and the kernel who is in front; Ctrl-C still ends at once."""
    interrupts = Interrupts()
    told: list[str] = []
    is_killed = asyncio.Event()
    interrupts.at_once = is_killed.set

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            told.append("killed" if is_killed.is_set() else "cleans up")
            os.kill(os.getpid(), signal.SIGINT)
            await is_killed.wait()

    assert interrupts.run(main) == 128 + signal.SIGHUP
    assert told == ["cleans up"]
