"""Files that a reader finds whole: the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside it, then rename it: whole or not at all. A device, a pipe or a link is
    written to: a rename would put a file in its place. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
