"""Where a worker and its ranks find each other while they start: a folder, gone once they have met.

What a worker left that was killed amid its start, its folder and its ranks' shared memory, the next
start takes away: each holds its folder locked for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path

from shared.errors import EngineFailed

PREFIX = "pdmesh-ranks-"
_SHARED = Path("/dev/shm")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_SOCKET = 107
"""Bytes, on Linux."""
_LONGEST_NAME = 36
"""vLLM's queues between ranks have a UUID each."""


def meet() -> tuple[Path, int]:
    """Return a folder, this user's alone, and a descriptor to keep open until it is left."""
    for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _leave_if_dead(found)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # found by another start before it was locked
            lock = os.open(folder, _FOLDER)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, lock
            os.close(lock)


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
    with contextlib.suppress(OSError):  # it lives, is another user's, or has just been left
        lock = os.open(folder, _FOLDER)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leave(folder)
        finally:
            os.close(lock)
