"""The command line ``pdmesh``: thin. It parses, calls, prints; what it starts is a service.

Exit codes: 0 = done, 1 = it failed, 2 = a flag or the configuration is wrong, 3 = a drain came to
its limit, 130 = Ctrl-C. Every failure that the reader can mend is one line on stderr.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: that of ``sys.argv``) and return the exit code."""
    try:
        from services.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # before the command took the signals over
        return 130
