"""What the signals of a command do."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from services.cli.interrupts import run_interruptible


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
