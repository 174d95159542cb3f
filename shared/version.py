"""Our version, for logs and handshakes: that of the installed distribution."""

from __future__ import annotations

from importlib import metadata


def _read() -> str:
    try:
        return metadata.version("pdmesh")
    except metadata.PackageNotFoundError:
        return "unknown"


VERSION = _read()
