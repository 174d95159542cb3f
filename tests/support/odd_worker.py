"""``python -m tests.support.odd_worker ROLE``: a worker that is not as others are.

``PDMESH_ODD_PROTOCOL``: the protocol that it speaks, as a worker of another release does.
``PDMESH_ODD_CLOCK_S``: how wrong its clock is.
"""

from __future__ import annotations

import os
import runpy
import sys
import time

if __name__ == "__main__":
    from shared.messages import codec

    codec.PROTOCOL_VERSION = int(os.environ.get("PDMESH_ODD_PROTOCOL") or codec.PROTOCOL_VERSION)
    offset_s = float(os.environ.get("PDMESH_ODD_CLOCK_S") or 0.0)
    true_time = time.time
    time.time = lambda: true_time() + offset_s
    role = sys.argv.pop(1)  # services take no arguments
    runpy.run_module(f"services.{role}", run_name="__main__")
