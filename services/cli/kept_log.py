"""The log of a mesh that a command starts for itself: gone if all went well, else kept."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from rich.console import Console


@contextlib.contextmanager
def log_kept_on_failure(command: str, console: Console) -> Generator[Path]:
    """Make a log file for the length of the block. An error keeps it and says where it is; an
    interrupt does not."""
    descriptor, name = tempfile.mkstemp(prefix=f"pdmesh-{command}-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    try:
        yield log
    except Exception:
        console.print(f"logs: {log}")
        raise
    except BaseException:
        log.unlink()
        raise
    log.unlink()
