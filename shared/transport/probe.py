"""Which UCX this installation loads, as one JSON line: ``python -m shared.transport.probe``.

A program of its own, because a broken UCX may end the process that loads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import ucxx


def probe() -> dict[str, str | list[str]]:
    """Return the facts. library: file of the UCX that was loaded. modules: what it can drive beside
    TCP and shared memory, e.g. 'ib', 'cuda'."""
    ucxx.get_ucx_version()  # loads it
    maps = Path("/proc/self/maps").read_text()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libuct" in line}
    core = next((path for path in sorted(paths) if Path(path).name.startswith("libuct.")), "")
    found = Path(core).parent.glob("ucx/libuct_*.so*") if core else ()
    modules = {path.name.split(".")[0].removeprefix("libuct_") for path in found}
    return {"library": core, "modules": sorted(modules)}


if __name__ == "__main__":
    print(json.dumps(probe()))
