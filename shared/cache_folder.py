"""Where what can be made again is kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return our folder of that name in the user's cache folder; it may not exist yet, and cannot
    be made where the user has no home (a container's user without a line in passwd)."""
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path("/nonexistent" if base.startswith("~") else base) / "pdmesh" / name
