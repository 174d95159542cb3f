"""``python -m tests.support.small_bench bench.router.run "run.NUM_IDLE = 2" --quick``: a program of
``bench/``, made smaller by code first, in a process that can be forked (``fork_server.py``)."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    name, smaller = sys.argv[1:3]
    sys.argv = [name, *sys.argv[3:]]
    run = importlib.import_module(name)
    exec(smaller, {"run": run})
    run.main()
