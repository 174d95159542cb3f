"""Environments for other people's clients, one each: made on first use from the pins in
``tests/interop/clients``, kept in ``.cache/clients``, made again when the pins change.

A client's dependencies never meet ours or another client's. pip and npm run with the user's own
settings. To make some (or all) beforehand, or to try a client by hand:

    python -m tests.support.client_environments [NAME ...]
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.house import ROOT

PINS = ROOT / "tests/interop/clients"
CACHE = Path(os.environ.get("PDMESH_CLIENTS", ROOT / ".cache/clients"))
"""PDMESH_CLIENTS: a folder that outlives the checkout, for CI."""

MADE_WITHIN_S = 1800.0
SAYS_EVERY_S = 15.0

Say = Callable[[str], None]


class NoClient(Exception):
    """An environment could not be made; the message is what the test shows."""


def names() -> list[str]:
    """Every client that has pins here."""
    return sorted(path.stem for path in PINS.glob("*.txt"))


def python_client(
    name: str, say: Say = print, *, folder_of_pins: Path | None = None, options: Sequence[str] = ()
) -> Path:
    """Return the ``bin`` folder of a client's environment, made first if need be.

    options: further ones of ``pip install``.
    Raises NoClient: pip failed or took longer than MADE_WITHIN_S.
    """
    pins = (folder_of_pins or PINS) / f"{name}.txt"
    folder = CACHE / name
    with _made_once(folder, pins.read_bytes() + sys.version.encode()) as is_made:
        if not is_made:
            say(f"making the environment of {name} in {folder} (first use, or new pins)")
            python = folder / "bin/python"
            # Our pip installs into it: nothing but the client goes into the folder.
            _run(name, [sys.executable, "-m", "venv", "--without-pip", folder], say)
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
            _run(name, [*pip, *options, "-r", pins], say)
    return folder / "bin"


def node_client(name: str, say: Say = print) -> Path:
    """Return the ``node_modules`` of a lock file, for NODE_PATH.

    Raises NoClient: npm is missing, failed or took longer than MADE_WITHIN_S.
    """
    pins = [PINS / name / "package.json", PINS / name / "package-lock.json"]
    folder = CACHE / name
    npm = shutil.which("npm")
    if npm is None:
        raise NoClient("npm is not on the PATH")
    with _made_once(folder, b"".join(path.read_bytes() for path in pins)) as is_made:
        if not is_made:
            say(f"installing the packages of {name} in {folder} (first use, or new pins)")
            folder.mkdir()
            for path in pins:
                shutil.copy(path, folder)
            _run(name, [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], say, cwd=folder)
    return folder / "node_modules"


@contextmanager
def _made_once(folder: Path, pins: bytes) -> Generator[bool]:
    """Hold the folder's lock; tells whether it was made from these very pins, else removes it. If
    the block succeeds, it was."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = hashlib.sha256(pins).hexdigest()
    mark = folder / ".made-from"
    with open(CACHE / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be making it
        is_made = mark.exists() and mark.read_text() == wanted
        if not is_made:
            shutil.rmtree(folder, ignore_errors=True)
        yield is_made
        mark.write_text(wanted)


def _run(name: str, command: Sequence[str | Path], say: Say, *, cwd: Path | None = None) -> None:
    done = threading.Event()

    def keep_talking() -> None:
        waited = 0.0
        while not done.wait(SAYS_EVERY_S):
            waited += SAYS_EVERY_S
            say(f"still installing {name}: {waited:g} s")

    talker = threading.Thread(target=keep_talking)
    talker.start()
    try:
        result = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoClient(f"{name} could not be installed within {MADE_WITHIN_S:g} s") from None
    finally:
        done.set()
        talker.join()
    if result.returncode:
        words = (result.stdout + result.stderr)[-2000:]
        raise NoClient(f"{' '.join(map(str, command))} failed:\n{words}")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [*names(), "node"]:
        make = node_client if chosen == "node" else python_client
        print(make(chosen), flush=True)
