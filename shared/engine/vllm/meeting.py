"""Where a worker and its ranks find each other while they start: a folder, gone once they have met.

What a worker left that was killed amid its start, its folder and its ranks' shared memory, the next
start takes away: each holds its folder's lock for as long as it lives.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from shared.errors import EngineFailed

PREFIX = "pdmesh-ranks-"
_LOCK = "lock"
_SHARED = Path("/dev/shm")
_LONGEST_SOCKET = 107
"""Bytes, on Linux."""
_LONGEST_NAME = 36
"""vLLM's queues between ranks have a UUID each."""


def meet() -> tuple[Path, IO[bytes]]:
    """Return a folder, this user's alone, and what to keep open until it is left."""
    for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _leave_if_dead(found)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    new = folder / f"{_LOCK}.new"
    lock = new.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / _LOCK)  # nobody may find one that is not locked yet
    return folder, lock


def require_room_for_sockets(folder: Path) -> None:
    """Raises EngineFailed: ranks' sockets, ours and vLLM's, would have names in there that are
    longer than the system takes."""
    place = folder.parent
    most = _LONGEST_SOCKET - _LONGEST_NAME - 1 - (len(folder.name) + 1)
    if len(os.fsencode(place)) > most:
        raise EngineFailed(
            f"ranks meet at sockets in {place}, which is longer than {most} bytes: name a shorter "
            "folder for temporary files (TMPDIR)"
        )


def leave(folder: Path) -> None:
    """All have met, and nothing needs its name any more: so nothing stays behind, whatever ends a
    worker, in a folder or in shared memory."""
    shutil.rmtree(folder, ignore_errors=True)
    for shared in _SHARED.glob(f"{glob.escape(folder.name)}-*"):
        shared.unlink(missing_ok=True)


def _leave_if_dead(folder: Path) -> None:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leave(folder)
    except OSError:
        pass  # it lives, is another user's, or has just been left
