"""Ctrl-C in a command that owns something: the first one cleans up, the second one ends at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from shared.runtime.service import ending_signals

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
Main = Callable[[], Coroutine[Any, Any, None]]


class Interrupts:
    """What the signals of a command do. at_once: called at the second one; set it when there is
    something to end."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.on_first: Callable[[], None] = lambda: None
        self.at_once: Callable[[], None] = lambda: None

    def run(
        self, main: Main, *, new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> int:
        """Run ``main`` on a fresh loop, asyncio's own if ``new_loop`` makes none; the first signal
        cancels it.

        Returns 0, or 128 + the signal's number (Ctrl-C: 130). Its errors are raised.
        """
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(self._run(main))

    async def _run(self, main: Main) -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: signal.Signals) -> None:
            # A terminal that goes away says so once itself, and once by its shell.
            if self.received and number is signal.SIGHUP:
                return
            self.received.append(number)
            if len(self.received) == 1:
                task.cancel()
                self.on_first()
            else:
                self.at_once()

        signals = ending_signals()
        for number in signals:
            loop.add_signal_handler(number, on_signal, number)
        try:
            await main()
            return 0
        except asyncio.CancelledError:
            if not self.received:
                raise
            return 128 + self.received[0]
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def run_interruptible(
    main: Main, *, new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """Run a command that owns nothing (``Interrupts.run``): the second signal ends the process."""
    interrupts = Interrupts()
    interrupts.at_once = lambda: os._exit(EXIT_INTERRUPTED)
    return interrupts.run(main, new_loop=new_loop)
