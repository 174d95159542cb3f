"""Whether files have changed since somebody looked: asked when their content is needed, so that a
new certificate or key counts from the next connection or call on, without a task that looks.

Looking is one ``stat`` a file, 1 to 2 us.
"""

from __future__ import annotations

import os
from pathlib import Path

_Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Some files, as they were when last looked at; a missing file is a state, too."""

    def __init__(self, *paths: Path | None) -> None:
        self._paths = tuple(path for path in paths if path is not None)
        self._seen = self._look()

    def have_changed(self) -> bool:
        """Whether one differs from what it was at the last call. Ask before reading them: what is
        written meanwhile is then a change for the next call."""
        now = self._look()
        has_changed = now != self._seen
        self._seen = now
        return has_changed

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
