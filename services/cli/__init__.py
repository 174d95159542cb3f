"""The command line ``pdmesh``: thin. It parses, calls, prints; what it starts is a service.

Exit codes: 0 = done, 1 = it failed, 2 = a flag or the configuration is wrong, 3 = a drain came to
its limit, 130 = Ctrl-C. Every failure that the reader can mend is one line on stderr.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: that of ``sys.argv``) and return the exit code."""
    _ready_streams()
    if os.getpid() == 1:
        # In a container the kernel drops SIGTERM until somebody handles it: what is told to end
        # while it still imports would start all the same, and be killed amid its answers.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        from services.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # before the command took the signals over
        return 130


def _ready_streams() -> None:
    """Give streams that were closed (``>&-``) an end: Python has None for them, and the first
    socket would take such a number, into which a child then writes its log. What a terminal cannot
    show is written as an escape, and what is no text is refused, in whichever locale."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, "r" if name == "stdin" else "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="strict" if name == "stdin" else "backslashreplace")
