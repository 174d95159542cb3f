"""What must be settled before the first test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Triton decides at its import whether kernels run in its interpreter, and transformers may
    # import it. Without a GPU the interpreter is the only place where they run; nothing but the
    # tests of our kernels uses it (tests/support/interpreted.py).
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What workers of tests measure of a machine that is busy with tests is not for the user's own.
os.environ.setdefault("PDMESH_PROFILE_FILE", str(Path(__file__).parents[1] / ".cache" / "profiles"))
