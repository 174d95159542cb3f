"""The steps of the preparation: each is said with the time so far, its output goes to a log, and
the end of that is shown only if the step fails. Knows nothing of Docker."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_BEGAN_AT = time.monotonic()
_SHOWN_LINES = 40


class CannotRun(Exception):
    """This machine lacks something, or a step failed; the message says what to do."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[compose-test {time.monotonic() - _BEGAN_AT:4.0f} s] {text}", flush=True)


class Steps:
    """Runs commands; all that they print is in one file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        log.write_text("")

    def run(
        self, what: str, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> None:
        """Say ``what`` and run the command to its end.

        Raises CannotRun: it failed, or there is no such program."""
        say(what)
        with self._log.open("a") as log:
            print(f"\n=== {what}: {' '.join(map(str, command))}", file=log, flush=True)
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    check=False,
                ).returncode
            except OSError as error:
                raise CannotRun(f"{what}: {command[0]}: {error.strerror}") from None
        if status:
            raise CannotRun(f"{what} failed ({status}):\n{last_lines(self._log)}")


def last_lines(log: Path) -> str:
    """Return the end of a log and where the rest is."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join([*lines, f"(all of it: {log})"])


def output_of(*command: str, timeout_s: float = 60) -> str | None:
    """Return what a quick command prints; None if it fails, hangs or does not exist."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
